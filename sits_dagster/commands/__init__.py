"""What the verbs of `sits` do, one a file."""
