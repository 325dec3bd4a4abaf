"""Optimizers of other libraries, written out here as published: schedule-free AdamW and GaLore, bit for bit.

And those of bitsandbytes, in and out of memory.
"""

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import zinf_compile
from tests.support.optimizer_twins import assert_same
from zinf_compile.runtime.params.records import record_of

pytestmark = pytest.mark.needs_more_on_streams(device_memory=2)  # else weights are tiled, and sums rounded otherwise

BUDGETS = {
    "device": {"device_memory": "64MiB", "host_memory": "64MiB"},
    "nvme": {"device_memory": "1MiB", "host_memory": "2MiB"},
}
PLACES = ["nvme", pytest.param("device", marks=pytest.mark.long)]
WIDTH = 192
NUM_STEPS = 5


class ScheduleFreeAdamW(Optimizer):
    """ "The Road Less Scheduled" (arXiv 2405.15682), as the package schedulefree has it without foreach.

    The parameter is y in training; ``eval()`` makes it x, from its state z, and ``train()`` makes it y again.
    """

    def __init__(self, params: Any, lr: float = 2.5e-3, warmup_steps: int = 2, weight_decay: float = 0.1) -> None:
        defaults = {
            "lr": lr, "betas": (0.9, 0.999), "eps": 1e-8, "r": 0.0, "k": 0, "warmup_steps": warmup_steps, "train_mode": True,
            "weight_sum": 0.0, "lr_max": -1.0, "scheduled_lr": 0.0, "weight_lr_power": 2.0, "weight_decay": weight_decay,
        }  # fmt: skip
        super().__init__(params, defaults)

    @torch.no_grad()
    def eval(self) -> None:
        self._swap(False, lambda beta: 1 - 1 / beta)

    @torch.no_grad()
    def train(self) -> None:
        self._swap(True, lambda beta: 1 - beta)

    def _swap(self, mode: bool, weight_of: Callable[[float], float]) -> None:
        for group in self.param_groups:
            if group["train_mode"] is not mode:
                for parameter in group["params"]:
                    if "z" in (state := self.state[parameter]):
                        parameter.lerp_(end=state["z"], weight=weight_of(group["betas"][0]))
                group["train_mode"] = mode

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        if not self.param_groups[0]["train_mode"]:
            raise RuntimeError("Optimizer was not in train mode when step is called.")
        for group in self.param_groups:
            (beta1, beta2), k = group["betas"], group["k"]
            scale = (k + 1) / group["warmup_steps"] if k < group["warmup_steps"] else 1.0
            lr = group["scheduled_lr"] = group["lr"] * scale
            lr_max = group["lr_max"] = max(lr, group["lr_max"])
            weight = ((k + 1) ** group["r"]) * (lr_max ** group["weight_lr_power"])
            group["weight_sum"] += weight
            share = weight / group["weight_sum"] if group["weight_sum"] else 0
            for parameter in group["params"]:
                if (grad := parameter.grad) is None:
                    continue
                state = self.state[parameter]
                if "z" not in state:
                    state["z"] = torch.clone(parameter, memory_format=torch.preserve_format)
                    state["exp_avg_sq"] = torch.zeros_like(parameter)
                z, exp_avg_sq = state["z"], state["exp_avg_sq"]
                exp_avg_sq.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
                denom = exp_avg_sq.div(1 - beta2 ** (k + 1)).sqrt_().add_(group["eps"])
                normalised = grad.div_(denom)
                normalised.add_(parameter, alpha=group["weight_decay"])
                parameter.lerp_(end=z, weight=share)
                parameter.add_(normalised, alpha=lr * (beta1 * (1 - share) - 1))
                z.sub_(normalised, alpha=lr)
            group["k"] = k + 1


class Projector:
    """Projects a gradient to its leading singular vectors, which are found again every few steps."""

    def __init__(self, rank: int, gap: int) -> None:
        self.rank, self.gap = rank, gap
        self.matrix: Tensor | None = None

    def project(self, grad: Tensor, step: int) -> Tensor:
        is_tall = grad.shape[0] >= grad.shape[1]
        if self.matrix is None or step % self.gap == 0:
            u, _, vh = torch.linalg.svd(grad, full_matrices=False)
            self.matrix = vh[: self.rank, :] if is_tall else u[:, : self.rank]
        return grad @ self.matrix.t() if is_tall else self.matrix.t() @ grad

    def project_back(self, low: Tensor) -> Tensor:
        assert self.matrix is not None
        is_tall = low.shape[0] >= low.shape[1] if self.matrix.shape[0] == low.shape[1] else False
        return 0.25 * (low @ self.matrix if is_tall else self.matrix @ low)


class GaLoreAdamW(Optimizer):
    """AdamW with "Gradient Low-Rank Projection" (arXiv 2403.03507) for groups with a rank, as galore-torch has it."""

    def __init__(self, params: Any, lr: float = 1e-3, weight_decay: float = 0.01) -> None:
        super().__init__(params, {"lr": lr, "betas": (0.9, 0.999), "eps": 1e-6, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for parameter in group["params"]:
                if (grad := parameter.grad) is None:
                    continue
                state = self.state[parameter]
                state.setdefault("step", 0)
                if "rank" in group:
                    if "projector" not in state:
                        state["projector"] = Projector(group["rank"], group["update_proj_gap"])
                    grad = state["projector"].project(grad, state["step"])
                if "exp_avg" not in state:
                    state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(grad), torch.zeros_like(grad)
                state["step"] += 1
                state["exp_avg"].mul_(beta1).add_(grad, alpha=1.0 - beta1)
                state["exp_avg_sq"].mul_(beta2).addcmul_(grad, grad, value=1.0 - beta2)
                denom = state["exp_avg_sq"].sqrt().add_(group["eps"])
                size = group["lr"] * math.sqrt(1.0 - beta2 ** state["step"]) / (1.0 - beta1 ** state["step"])
                change = state["exp_avg"] / denom
                if "rank" in group:
                    change = state["projector"].project_back(change)
                parameter.add_(change, alpha=-size)
                parameter.add_(parameter, alpha=-group["lr"] * group["weight_decay"])


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    layers: list[nn.Module] = [nn.Linear(32, WIDTH)]
    for _ in range(4):
        layers += [nn.Tanh(), nn.Linear(WIDTH, WIDTH)]
    return nn.Sequential(*layers, nn.LayerNorm(WIDTH))


def train(model: nn.Module, optimizer: Optimizer, steps: range) -> Tensor:
    losses = []
    for step in steps:
        batch = torch.randn(5, 32, generator=torch.Generator().manual_seed(step))
        loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return torch.stack(losses)


def loss_of(model: nn.Module) -> Tensor:
    with torch.no_grad():
        return model(torch.ones(3, 32)).square().mean()


def assert_same_pairs(pairs: list[tuple[nn.Module, Any]]) -> None:
    (model, optimizer), (plain, plain_optimizer) = pairs
    assert_same("model", dict(model.state_dict()), dict(plain.state_dict()))
    assert_same("optimizer", optimizer.state_dict(), plain_optimizer.state_dict())


@pytest.fixture
def optimize(tmp_path: Path) -> Iterator[Callable[..., nn.Module]]:
    models = []

    def make(place: str, **options: Any) -> nn.Module:
        models.append(zinf_compile.optimize(make_model(), **{**BUDGETS[place], "nvme": tmp_path, **options}))
        return models[-1]

    yield make
    for model in models:
        zinf_compile.close(model)


@pytest.mark.parametrize("place", PLACES)
def test_schedule_free(optimize: Callable[..., nn.Module], tmp_path: Path, place: str) -> None:
    model, plain = optimize(place), make_model()
    pairs = [(each, ScheduleFreeAdamW(each.parameters())) for each in (model, plain)]
    losses: list[list[Tensor]] = []
    for each, optimizer in pairs:
        losses.append([train(each, optimizer, range(3))])
        optimizer.eval()
        losses[-1].append(loss_of(each))
        optimizer.train()
        losses[-1] += [loss_of(each), train(each, optimizer, range(3, NUM_STEPS))]
    assert all(map(torch.equal, *losses))
    assert_same_pairs(pairs)
    assert pairs[0][1].param_groups[0]["k"] == NUM_STEPS
    zinf_compile.save(tmp_path / "saved", *pairs[0])
    again = make_model()
    again_optimizer = ScheduleFreeAdamW(again.parameters())
    zinf_compile.load(tmp_path / "saved", again, again_optimizer)
    assert torch.equal(train(again, again_optimizer, range(5, 7)), train(*pairs[1], range(5, 7)))


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    matrices = [parameter for parameter in model.parameters() if parameter.shape == (WIDTH, WIDTH)]
    others = [parameter for parameter in model.parameters() if parameter.shape != (WIDTH, WIDTH)]
    return [{"params": matrices, "rank": 24, "update_proj_gap": 2}, {"params": others}]


@pytest.mark.parametrize("place", PLACES)
def test_galore(optimize: Callable[..., nn.Module], place: str) -> None:
    options = {"device_memory": "2MiB"} if place == "nvme" else {}  # for the singular vectors of a whole gradient
    model, plain = optimize(place, **options), make_model()
    pairs = [(each, GaLoreAdamW(groups_of(each))) for each in (model, plain)]
    ours, theirs = (train(*pair, range(NUM_STEPS)) for pair in pairs)
    assert torch.equal(ours, theirs)
    for mine, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(mine, other)
        for key in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(pairs[0][1].state[mine][key], pairs[1][1].state[other][key])
    record = record_of(model[2].weight)
    assert record is not None
    assert {slot.tensor.shape for slot in record.copies.states.values()} == {torch.Size([WIDTH, 24])}


BLOCK_WISE = [
    "Adam8bit",
    "AdamW8bit",
    "PagedAdamW8bit",
    "Lion8bit",
    "PagedLion8bit",
    "AdEMAMix8bit",
    "PagedAdEMAMix8bit",
]
# Without AdEMAMix32bit, which raises in bitsandbytes itself on a CPU.
IN_FULL = ["AdamW32bit", "PagedAdamW32bit", "PagedAdamW", "Lion32bit", "RMSprop32bit", "SGD32bit"]
SOME = ["AdamW8bit", "PagedAdamW32bit"]


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(
    "name",
    [*SOME, *(pytest.param(each, marks=pytest.mark.long) for each in [*BLOCK_WISE, *IN_FULL] if each not in SOME)],
)
def test_bitsandbytes(optimize: Callable[..., nn.Module], name: str, place: str) -> None:
    library = pytest.importorskip("bitsandbytes").optim
    options = {"momentum": 0.9} if name == "SGD32bit" else {}
    model, plain = optimize(place), make_model()
    pairs = [(each, getattr(library, name)(each.parameters(), lr=1e-3, **options)) for each in (model, plain)]
    ours, theirs = (train(*pair, range(3)) for pair in pairs)
    assert torch.equal(ours, theirs)
    assert_same_pairs(pairs)
