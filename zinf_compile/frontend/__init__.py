"""What users call: ``optimize``, ``plan``, and the backend of ``torch.compile``."""
