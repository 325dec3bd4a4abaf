"""Graph to Facts: what is true of a graph (ops, bytes, seconds, live ranges). Decides nothing."""
