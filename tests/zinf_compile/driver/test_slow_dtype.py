"""A person who asks for bfloat16 on a CPU that has no instructions for it is told what that costs, once."""

import logging

import pytest
import torch
from torch import nn

import zinf_compile
from zinf_compile.driver import session


@pytest.mark.parametrize(
    ("is_fast", "dtype", "num_said"),
    [(False, torch.bfloat16, 1), (True, torch.bfloat16, 0), (False, None, 0)],
)
def test_a_slow_dtype_is_said_once(
    is_fast: bool,
    dtype: torch.dtype | None,
    num_said: int,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(session, "has_fast_bfloat16", lambda: is_fast)
    models = [nn.Linear(4, 4), nn.Linear(4, 4)]
    with caplog.at_level(logging.WARNING, logger="zinf_compile"):
        zinf_compile.optimize(models[0], device_memory="8MiB", host_memory="8MiB", compute_dtype=dtype)
        zinf_compile.optimize(models[1], share=models[0])
    zinf_compile.close(models[0])
    said = [each.getMessage() for each in caplog.records if "bfloat16" in each.getMessage()]
    assert len(said) == num_said
    assert all("Linear computes in bfloat16" in each for each in said)
