"""Real libraries behind the planes' protocols: one subject a file, errors translated here only."""
