"""Context parallelism: ranks divide a sequence, and each gathers the keys and values of all of it for attention.

To a store such ranks are like those with other batches: every parameter is the same on all of them, and gradients are
averaged over both dimensions of the mesh.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import _functional_collectives as collectives
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional

import zinf_compile
from tests.distributed.workloads import KIB, check_at_rest, full, optimize, record_full
from tests.support.rank_pool import RankPool
from tests.support.traces import Trace, assert_same

WIDTH, VOCABULARY, LENGTH = 60, 51, 12


class _Gather(torch.autograd.Function):
    """Gathers the parts of a sequence. As ring attention is written: dynamo does not trace it, and breaks the graph."""

    @staticmethod
    @torch.compiler.disable
    def forward(ctx: Any, part: Tensor, group: dist.ProcessGroup) -> Tensor:
        """Return all parts, side by side."""
        ctx.group = group
        parts = [torch.empty_like(part, memory_format=torch.contiguous_format) for _ in range(group.size())]
        dist.all_gather(parts, part.contiguous(), group=group)
        return torch.cat(parts, 1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        """Return the gradient of the part of this rank, from all ranks."""
        total = grad.clone()
        dist.all_reduce(total, group=ctx.group)
        return total.chunk(ctx.group.size(), 1)[ctx.group.rank()], None


class Decoder(nn.Module):
    """Two blocks over the part of a sequence that a rank has; ``gather`` says how it gets what others have."""

    def __init__(self, gather: str = "") -> None:
        super().__init__()
        self.embed, self.position = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.first, self.second = Block(gather), Block(gather)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor, positions: Tensor, targets: Tensor) -> Tensor:
        """Return the loss of these positions."""
        hidden = self.embed(tokens) + self.position(positions)
        hidden = self.second(self.first(hidden, positions), positions)
        return functional.cross_entropy(self.head(hidden).flatten(0, 1), targets.flatten())


class Block(nn.Module):
    """Causal attention over the whole sequence, and an MLP."""

    def __init__(self, gather: str) -> None:
        super().__init__()
        self.gather, self.group = gather, None
        self.attend, self.project = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 181), nn.Linear(181, WIDTH)

    def forward(self, hidden: Tensor, positions: Tensor) -> Tensor:
        """Return the hidden states after the block."""
        query, key, value = self.attend(hidden).chunk(3, dim=-1)
        if self.gather == "eager":
            key, value = _Gather.apply(key, self.group), _Gather.apply(value, self.group)
        elif self.gather == "traced":
            key, value = self._gather_traced(key), self._gather_traced(value)
        mask = positions[:, None] >= torch.arange(LENGTH)
        hidden = hidden + self.project(functional.scaled_dot_product_attention(query, key, value, mask))
        return hidden + self.down(functional.gelu(self.up(hidden)))

    def _gather_traced(self, part: Tensor) -> Tensor:
        gathered = collectives.all_gather_tensor_autograd(part.transpose(0, 1).contiguous(), 0, self.group)
        return gathered.transpose(0, 1)


def build_decoder(gather: str = "", group: Any = None) -> Decoder:
    """Return a Decoder, the same on every rank."""
    torch.manual_seed(0)
    model = Decoder(gather)
    model.first.group = model.second.group = group
    return model


def loss_of(model: nn.Module, step: int, replica: int, part: slice = slice(LENGTH)) -> Tensor:
    """Return the loss of a part of the sequences of a replica."""
    tokens = torch.randint(0, VOCABULARY, (2, LENGTH + 1), generator=torch.Generator().manual_seed(10 * step + replica))
    here = (tokens[:, :-1][:, part], torch.arange(LENGTH)[part], tokens[:, 1:][:, part])
    loss: Tensor = model(*(each.contiguous() for each in here))
    return loss


def train(model: nn.Module, batches: list[tuple[int, slice]], *, reduces: bool = False) -> Trace:
    """Return the full numbers of some steps over these parts of the sequences of replicas.

    ``reduces``: this plain model adds up the gradients of all ranks, in their order.
    """
    optimizer, trace = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3), Trace()
    for step in range(3):
        for replica, part in batches:
            loss = loss_of(model, step, replica, part)
            (loss / len(batches) if len(batches) > 1 else loss).backward()
            trace.losses.append(loss.detach().clone())
        if reduces:
            _reduce(model)
        trace.gradients.append({name: full(each.grad) for name, each in model.named_parameters()})
        optimizer.step()
        optimizer.zero_grad()
        record_full(trace, model, optimizer)
    return trace


def _reduce(model: nn.Module) -> None:
    """Average the gradients of all ranks, added up in their order."""
    for parameter in model.parameters():
        assert parameter.grad is not None
        every = [torch.empty_like(parameter.grad) for _ in range(dist.get_world_size())]
        dist.all_gather(every, parameter.grad)
        total = every[0].clone()
        for grad in every[1:]:
            total += grad
        parameter.grad = total / dist.get_world_size()


def train_parts(gather: str, options: Mapping[str, Any]) -> tuple[Trace, Trace, int]:
    """Return what four ranks get, two for each sequence, and what they get in plain PyTorch; and how many graphs run."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
    replica, number = mesh.get_coordinate()
    half = LENGTH // 2
    mine = [(replica, slice(number * half, (number + 1) * half))]
    group = mesh["cp"].get_group()
    plain = train(build_decoder(gather, group), mine, reduces=True)
    model = optimize(build_decoder(gather, group), options)
    ours = train(model, mine)
    check_at_rest(model)
    num_graphs = len(zinf_compile.report(model).plans)
    zinf_compile.close(model)
    return ours, plain, num_graphs


def options_in(folder: Path) -> dict[str, Mapping[str, Any]]:
    """Return budgets that put parameters on each tier."""
    common = {"compute": "aten", "reserve_memory": 0, "nvme": str(folder)}
    return {
        "nvme": {**common, "streams": True, "device_memory": 640 * KIB, "host_memory": 560 * KIB},
        "resident": {**common, "device_memory": 4096 * KIB, "host_memory": 4096 * KIB},
        "eager": {**common, "capture": False, "device_memory": 640 * KIB, "host_memory": 560 * KIB},
    }


@pytest.mark.filterwarnings("ignore:.*all_gather_tensor_autograd:FutureWarning")
@pytest.mark.parametrize("placement", ["nvme", "resident", "eager"])
@pytest.mark.parametrize("gather", ["traced", "eager"])
def test_ranks_that_divide_sequences(gather: str, placement: str, four: RankPool, tmp_path: Path) -> None:
    alone = train(build_decoder(), [(0, slice(LENGTH)), (1, slice(LENGTH))])
    outcomes = four.run(train_parts, gather, options_in(tmp_path)[placement])
    for ours, plain, num_graphs in outcomes:
        assert_same(ours, plain)
        torch.testing.assert_close(ours.gradients, alone.gradients, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(ours.parameters, alone.parameters, rtol=1e-6, atol=1e-6)
        least, most = (0, 0) if placement == "eager" else (1, 1) if gather == "traced" else (3, 8)
        assert least <= num_graphs <= most
    losses = torch.stack([torch.stack(ours.losses) for ours, _, _ in outcomes])
    torch.testing.assert_close(
        losses.view(2, 2, -1).mean(1).T.flatten(), torch.stack(alone.losses), rtol=1e-6, atol=1e-6
    )
