"""Values in yaml, their schema, and the entry that checks them."""
