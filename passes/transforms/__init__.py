"""Graph edits: before autograd, on the joint graph, into segments, and to a lowered graph."""
