"""Arena offsets; which activations are saved and which are recomputed."""
