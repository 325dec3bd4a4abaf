"""What needs a GPU: skipped where there is none."""

import os

import pytest

# Before CUDA is asked for anything: products give the same bits whenever they run.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark everything here, and skip it without a GPU."""
    import torch

    for item in items:
        if "tests/gpu" in str(item.path):
            item.add_marker(pytest.mark.gpu)
            if not torch.cuda.is_available():
                item.add_marker(pytest.mark.skip(reason="there is no GPU"))
