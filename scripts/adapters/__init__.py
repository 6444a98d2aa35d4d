"""Programs that run other people's drafters with their own code, each under an interpreter of its own."""
