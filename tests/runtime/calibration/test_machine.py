"""What this machine has and allows, where the environment decides it."""

import pytest

from zinf_compile.runtime.calibration.machine import kernel_cache_nbytes

ONEDNN, LRU = "ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"


def test_kernels_are_counted_by_what_the_environment_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (ONEDNN, LRU):
        monkeypatch.delenv(name, raising=False)
    by_default = kernel_cache_nbytes()
    monkeypatch.setenv(ONEDNN, "64")
    few = kernel_cache_nbytes()
    monkeypatch.setenv(LRU, "64")
    assert 16 * kernel_cache_nbytes() == by_default > few > kernel_cache_nbytes() > 32 * 2**20
    monkeypatch.setenv(ONEDNN, "many")
    monkeypatch.setenv(LRU, "")
    assert kernel_cache_nbytes() == by_default
