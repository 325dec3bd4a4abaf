"""Expert parallelism: ranks have some of the experts each, and exchange rows by all-to-all, over one dimension of a mesh.

The experts are DTensors divided by ``Shard(0)``. Ranks of that dimension read the same batch, and route a part of it each.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard
from torch.nn import functional

import zinf_compile
from tests.distributed.workloads import KIB, check_at_rest, full, optimize, record_full
from tests.support.rank_pool import RankPool
from tests.support.traces import Trace, assert_same

WIDTH, NUM_EXPERTS, ROWS = 40, 4, 12


class Experts(nn.Module):
    """Four experts, of which a router picks one for each row; ``mesh`` has the ranks that have some of them each."""

    def __init__(self, mesh: DeviceMesh | None = None) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, NUM_EXPERTS)
        self.up = nn.Parameter(torch.randn(NUM_EXPERTS, WIDTH, 3 * WIDTH) / WIDTH**0.5)
        self.down = nn.Parameter(torch.randn(NUM_EXPERTS, 3 * WIDTH, WIDTH) / (3 * WIDTH) ** 0.5)
        self.mesh = mesh
        if mesh is not None:
            self.up = nn.Parameter(distribute_tensor(self.up.detach(), mesh, [Shard(0)]))
            self.down = nn.Parameter(distribute_tensor(self.down.detach(), mesh, [Shard(0)]))

    def forward(self, x: Tensor) -> Tensor:
        """Return what experts add to rows."""
        weights, experts = self.router(x).softmax(-1).max(-1)
        return x + weights[:, None] * (self._compute(x, experts) if self.mesh is None else self._exchange(x, experts))

    def _compute(self, x: Tensor, experts: Tensor) -> Tensor:
        order = experts.argsort(stable=True)
        return self._run(x[order], experts[order], self.up, self.down)[order.argsort()]

    def _exchange(self, x: Tensor, experts: Tensor) -> Tensor:
        """Send this rank's part of the rows to those that have their experts, and gather what comes back."""
        mesh = self.mesh
        assert mesh is not None
        group, rank, each = mesh.get_group(), mesh.get_local_rank(), NUM_EXPERTS // mesh.size()
        mine = DTensor.from_local(x, mesh, [Replicate()]).redistribute(placements=[Shard(0)]).to_local()
        chosen = experts.chunk(mesh.size())[rank]
        order = chosen.argsort(stable=True)
        sends = (chosen // each).bincount(minlength=mesh.size()).tolist()
        takes = [int((part // each == rank).sum()) for part in experts.chunk(mesh.size())]
        rows = all_to_all_single_autograd(mine[order], takes, sends, group)
        theirs = torch.cat(
            [part.sort().values[part.sort().values // each == rank] for part in experts.chunk(mesh.size())]
        )
        by_expert = theirs.argsort(stable=True)
        assert isinstance(self.up, DTensor)
        assert isinstance(self.down, DTensor)
        done = self._run(rows[by_expert], theirs[by_expert] - rank * each, self.up.to_local(), self.down.to_local())
        back = all_to_all_single_autograd(done[by_expert.argsort()], sends, takes, group)[order.argsort()]
        whole: Tensor = DTensor.from_local(back, mesh, [Shard(0)]).redistribute(placements=[Replicate()]).to_local()
        return whole

    def _run(self, rows: Tensor, experts: Tensor, up: Tensor, down: Tensor) -> Tensor:
        """Return what experts make of rows that are in their order."""
        parts = rows.split(experts.bincount(minlength=len(up)).tolist())
        return torch.cat([functional.gelu(part @ up[n]) @ down[n] for n, part in enumerate(parts)])


def build(mesh: DeviceMesh | None = None) -> nn.Module:
    """Return two blocks of experts between layers that every rank has, the same on every rank."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), Experts(mesh), nn.Linear(WIDTH, WIDTH), Experts(mesh))


def train(model: nn.Module, replicas: list[int]) -> Trace:
    """Return the full numbers of some steps, each over the batches of some replicas, averaged."""
    optimizer, trace = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3), Trace()
    for step in range(3):
        for replica in replicas:
            x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(10 * step + replica))
            loss = (model(x) - x).square().mean()
            loss.backward()
            trace.losses.append(loss.detach().clone())
        for parameter in model.parameters():
            if len(replicas) > 1 and parameter.grad is not None:
                parameter.grad.div_(len(replicas))
        trace.gradients.append({name: full(each.grad) for name, each in model.named_parameters()})
        optimizer.step()
        optimizer.zero_grad()
        record_full(trace, model, optimizer)
    return trace


def train_parts(options: Mapping[str, Any]) -> tuple[Trace, Trace, dict[str, Any]]:
    """Return what four ranks get, two for each replica, and two that accumulate both batches in plain PyTorch."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "ep"))
    plain = train(build(mesh["ep"]), [0, 1])
    model = optimize(build(mesh["ep"]), {**options, "mesh": mesh["dp"]})
    ours = train(model, [mesh.get_local_rank("dp")])
    seen = {name: (each.device_mesh.mesh_dim_names, each.placements) for name, each in model.named_parameters()}
    check_at_rest(model)
    zinf_compile.close(model)
    return ours, plain, seen


@pytest.mark.parametrize("placement", ["nvme", "resident"])
def test_ranks_that_have_some_experts_each(placement: str, four: RankPool, tmp_path: Path) -> None:
    options: dict[str, Any] = {"reserve_memory": 0, "device_memory": 4096 * KIB, "host_memory": 4096 * KIB}
    if placement == "nvme":
        options |= {"streams": True, "nvme": str(tmp_path), "device_memory": 512 * KIB, "host_memory": 560 * KIB}
    alone = train(build(), [0, 1])
    for rank, (ours, plain, seen) in enumerate(four.run(train_parts, options)):
        assert_same(ours, replace(plain, losses=plain.losses[rank // 2 :: 2]))
        torch.testing.assert_close(ours.losses, alone.losses[rank // 2 :: 2], rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(ours.gradients, alone.gradients, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(ours.parameters, alone.parameters, rtol=1e-6, atol=1e-6)
        assert seen["1.up"] == (("dp", "ep"), (_StridedShard(0, split_factor=2), Shard(0)))
        assert seen["1.router.weight"] == (("dp",), (Shard(0),))
