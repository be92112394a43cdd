"""The data plane: a partition's rows through a model, committed segment by segment."""
