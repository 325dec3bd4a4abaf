"""Creates long-lived tensors outside ``torch.inference_mode``, since inference tensors cannot be used in training."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def outside_inference() -> Iterator[None]:
    """Create normal tensors in this block, even in inference mode; grad mode does not change."""
    if not torch.is_inference_mode_enabled():
        yield
        return
    with torch.inference_mode(False), torch.set_grad_enabled(False):
        yield
