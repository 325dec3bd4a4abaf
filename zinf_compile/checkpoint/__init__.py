"""Save and resume: a model and its optimizer in a folder, bit by bit."""
