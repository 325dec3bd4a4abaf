"""From a torch-level graph to forward and backward graphs, of a real model or over fake tensors."""
