"""How a graph is split into forward and backward."""

from typing import Any

import pytest
import torch
from torch import nn
from torch._functorch import config as functorch_config
from torch.utils.checkpoint import checkpoint

import zinf_compile
from zinf_compile.passes.capture import aot


class _Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.dropout = nn.Linear(17, 17), nn.Dropout(0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = checkpoint(lambda x: self.dropout(self.layer(x)), x, use_reentrant=False)
        return result.sum()


def test_what_draws_again_in_backward_finds_the_random_state_among_saved_tensors(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All inputs of both graphs are tensors. With its generators as inputs torch would do this on CUDA only."""
    settings: list[bool] = []
    graphs: list[torch.fx.GraphModule] = []
    split = aot.min_cut_rematerialization_partition

    def note(*args: Any, **kwargs: Any) -> Any:
        settings.append(functorch_config.graphsafe_rng_functionalization)
        forward, backward = split(*args, **kwargs)
        graphs.extend((forward, backward))
        return forward, backward

    monkeypatch.setattr(aot, "min_cut_rematerialization_partition", note)
    model = zinf_compile.optimize(_Checkpointed(), device_memory="8MiB", host_memory="8MiB")
    model(torch.ones(3, 17)).backward()
    zinf_compile.close(model)
    assert settings
    assert not any(settings)
    placeholders = [node for graph in graphs for node in graph.graph.find_nodes(op="placeholder")]
    assert any("rng_state" in node.name for node in placeholders)
    assert all(isinstance(node.meta["val"], torch.Tensor) for node in placeholders)
