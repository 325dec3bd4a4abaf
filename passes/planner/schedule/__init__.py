"""What moves when: gathers, gradients, activations."""
