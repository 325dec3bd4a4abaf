"""Joint graph edits, after autograd and before partitioning: what the partitioner must know."""
