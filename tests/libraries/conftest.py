"""Tests of `make test-libraries`: people's training libraries on optimized models."""

import os
from pathlib import Path

import pytest

from tests.support.library_training import Comparison

_FOLDER = Path(__file__).parent
os.environ.setdefault("HF_HUB_OFFLINE", "1")


@pytest.hookimpl(tryfirst=True)  # before `-m` deselects
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark all tests of this folder."""
    for item in items:
        if _FOLDER in item.path.parents:
            item.add_marker(pytest.mark.libraries)


@pytest.fixture
def compare(tmp_path: Path) -> Comparison:
    """Return what trains twice and compares."""
    return Comparison(tmp_path)
