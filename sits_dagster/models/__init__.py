"""What a model is and what it costs. Pure values and functions."""
