"""One program per job: synthesize, evaluate, generate."""
