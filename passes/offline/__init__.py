"""A model to facts without weights: a skeleton of fake tensors, captured as the model itself would be."""
