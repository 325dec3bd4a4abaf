"""``verify``: what is alike is told from what is not, and the model stays as it is."""

import copy
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zinf_compile
from zinf_compile.frontend import verification
from zinf_compile.inspect.reports import ProcessReport, TierReport
from zinf_compile.ir.errors import ConfigError
from zinf_compile.ir.glossary import Tier
from zinf_compile.runtime.native.compiled import find_compiler

WIDTH = 64
BUDGETS = {"device_memory": "256KiB", "host_memory": "1MiB"}
needs_compiler = pytest.mark.skipif(find_compiler() is None, reason="there is no C++ compiler on the PATH")


class Net(nn.Module):
    """A few layers that end in a loss; with a buffer that a forward changes, and random numbers if asked for."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(6))
        self.norm = nn.BatchNorm1d(WIDTH)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        y = x
        for layer in self.layers:
            y = torch.tanh(layer(self.dropout(y)))
        return (self.norm(y) - x).square().mean()


@pytest.fixture
def net() -> nn.Module:
    torch.manual_seed(0)
    return Net()


@pytest.fixture
def inputs() -> Tensor:
    return torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(1))


def test_op_by_op_all_bits_are_compared(net: nn.Module, inputs: Tensor, tmp_path: Path) -> None:
    before, numbers = copy.deepcopy(net.state_dict()), torch.get_rng_state()
    verdict = zinf_compile.verify(net, inputs, nvme=tmp_path, compute="aten", tiles=False, **BUDGETS)
    assert verdict.is_right
    assert verdict.is_within_budgets
    assert verdict.rounding is None
    # 14 parameters with a gradient and three tensors of state, three buffers, three losses
    assert verdict.num_compared == 14 * 5 + 3 + 3
    assert verdict.notes == ()
    assert str(verdict).endswith("\nverdict: right, and within its budgets")
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())
    assert torch.equal(torch.get_rng_state(), numbers)
    assert all(parameter.grad is None and type(parameter) is nn.Parameter for parameter in net.parameters())
    assert list(tmp_path.iterdir()) == []


@needs_compiler
def test_by_default_bits_and_rounding_are_compared(net: nn.Module, inputs: Tensor, tmp_path: Path) -> None:
    verdict = zinf_compile.verify(net, inputs, nvme=tmp_path, compute="inductor", **BUDGETS)
    assert verdict.is_right
    assert verdict.num_compared == 14 * 5 + 3 + 3
    assert verdict.rounding is not None
    assert 0 < verdict.rounding.times_as_far < 10
    assert "times as far from exact ones" in str(verdict)


def test_what_differs_is_named(net: nn.Module, inputs: Tensor, tmp_path: Path) -> None:
    rates = iter((1e-3, 2e-3))

    def make_optimizer(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=next(rates))

    verdict = zinf_compile.verify(
        net, inputs, optimizer=make_optimizer, nvme=tmp_path, compute="aten", tiles=False, **BUDGETS
    )
    assert not verdict.is_right
    assert "layers.0.weight" in verdict.differing
    assert "loss of step 2" in verdict.differing
    assert not {"loss of step 1", "gradient of layers.0.weight"} & set(verdict.differing)
    assert str(verdict).endswith("\nverdict: WRONG")


@needs_compiler
def test_a_gradient_that_is_off_is_more_than_rounding(
    net: nn.Module, inputs: Tensor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def gradients_of(model: nn.Module) -> dict[str, Tensor]:
        found = true_gradients_of(model)
        if type(model.get_parameter("layers.3.weight")) is not nn.Parameter:  # of the optimized copies
            found["layers.3.weight"][0, 0] *= 1.1
        return found

    true_gradients_of = verification._gradients_of
    monkeypatch.setattr(verification, "_gradients_of", gradients_of)
    verdict = zinf_compile.verify(net, inputs, nvme=tmp_path, compute="inductor", **BUDGETS)
    assert verdict.rounding is not None
    assert verdict.rounding.parameter == "layers.3.weight"
    assert verdict.rounding.times_as_far > 10
    assert not verdict.is_right
    assert verdict.differing == ("gradient of layers.3.weight",)


@needs_compiler
@pytest.mark.parametrize(
    "change", [lambda found: found.pop("norm.bias"), lambda found: found["norm.bias"].fill_(torch.nan)]
)
def test_a_gradient_that_is_lost_or_no_number_is_wrong(
    net: nn.Module, inputs: Tensor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: Any
) -> None:
    def gradients_of(model: nn.Module) -> dict[str, Tensor]:
        found = true_gradients_of(model)
        if type(model.get_parameter("norm.bias")) is not nn.Parameter:  # of the optimized copies
            change(found)
        return found

    true_gradients_of = verification._gradients_of
    monkeypatch.setattr(verification, "_gradients_of", gradients_of)
    verdict = zinf_compile.verify(net, inputs, nvme=tmp_path, compute="inductor", **BUDGETS)
    assert verdict.rounding is not None
    assert (verdict.rounding.parameter, verdict.rounding.distance) == ("norm.bias", float("inf"))
    assert not verdict.is_right


def test_several_ranks_are_refused(net: nn.Module, inputs: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    with pytest.raises(ConfigError, match="one process is compared with one, and this is one of 2"):
        zinf_compile.verify(net, inputs)


def test_tiles_are_judged_by_rounding(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(256, 256), nn.Tanh(), nn.Linear(256, 256))
    options = {"device_memory": "3MiB", "host_memory": "1MiB", "tile_memory": "96KiB", "compute": "aten"}
    verdict = zinf_compile.verify(model, torch.randn(4, 256), loss=torch.sum, nvme=tmp_path, **options)
    assert verdict.is_right
    assert verdict.rounding is not None
    assert verdict.num_compared > 0  # without tiles it fits too


def test_micro_batches_are_judged_by_rounding(tmp_path: Path) -> None:
    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(64, 256), nn.Linear(256, 64)

        def forward(self, x: Tensor) -> Tensor:
            return x + self.down(self.up(x).tanh())

    model = nn.Sequential(Layer(), Layer())
    options = {"device_memory": "3MiB", "host_memory": "2MiB", "compute": "aten", "tiles": False, "micro_batches": 4}
    verdict = zinf_compile.verify(model, torch.randn(8, 64), loss=torch.sum, nvme=tmp_path, **options)
    assert verdict.is_right
    assert verdict.rounding is not None
    assert verdict.num_compared > 0  # whole it fits too


def test_what_does_not_fit_without_tiles_is_judged_by_rounding_alone(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(256, 1024), nn.Tanh(), nn.Linear(1024, 256))
    options = {"device_memory": "1700KiB", "host_memory": "1MiB", "compute": "aten"}
    verdict = zinf_compile.verify(model, torch.randn(4, 256), loss=torch.sum, nvme=tmp_path, **options)
    assert verdict.num_compared == 0
    assert verdict.rounding is not None
    assert verdict.is_right
    assert "without tiles it does not fit" in verdict.notes[0]


@needs_compiler
def test_random_numbers_leave_bits_to_compare(inputs: Tensor, tmp_path: Path) -> None:
    verdict = zinf_compile.verify(Net(dropout=0.5), inputs, nvme=tmp_path, compute="inductor", **BUDGETS)
    assert verdict.is_right
    assert verdict.rounding is None
    assert "draws random numbers" in verdict.notes[0]


def test_a_model_that_cannot_compute_in_float64(tmp_path: Path) -> None:
    class Narrow(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            return torch.mm(self.layer(x), torch.ones(WIDTH, WIDTH)).sum()

    options = {**BUDGETS, "compute": "aten"}
    verdict = zinf_compile.verify(Narrow(), torch.randn(2, WIDTH), nvme=tmp_path, **options)
    assert verdict.is_right
    assert "in float64, to compare with, the model fails" in verdict.notes[0]


def test_compute_copies(net: nn.Module, inputs: Tensor, tmp_path: Path) -> None:
    net.norm = nn.Identity()  # its statistics would have to be cast by hand
    options = {**BUDGETS, "compute": "aten", "tiles": False, "compute_dtype": "bfloat16"}
    verdict = zinf_compile.verify(net, inputs.bfloat16(), nvme=tmp_path, **options)
    assert verdict.is_right
    assert verdict.num_compared == 12 * 5 + 3


class Wrapped(nn.Module):
    """Returns a loss in some way."""

    def __init__(self, wrap: Any) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.wrap = wrap

    def forward(self, x: Tensor) -> Any:
        return self.wrap(self.layer(x).sum())


@pytest.mark.parametrize("wrap", [lambda loss: {"loss": loss}, lambda loss: (loss, 1), lambda loss: [loss]])
def test_where_a_loss_is_found(wrap: Any) -> None:
    options = {"device_memory": "1MiB", "host_memory": "1MiB", "capture": False}
    assert zinf_compile.verify(Wrapped(wrap), torch.ones(2, 4), steps=1, **options).is_right


@pytest.mark.parametrize("output", [torch.zeros(2), (), {"logits": torch.zeros(1)}, None])
def test_a_result_without_a_loss_is_refused(output: Any) -> None:
    with pytest.raises(ConfigError, match="no loss of one element; give loss="):
        verification._loss_of(output)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"steps": 0}, "steps is 0"),
        ({"state_dtype": "int8"}, "state_dtype cannot be verified"),
        ({"frozen_dtype": "int8"}, "frozen_dtype cannot be verified"),
        ({"init": "reset"}, "init cannot be verified"),
        ({"step_in_backward": True}, "step_in_backward cannot be verified"),
        ({"device_memry": 1}, "did you mean 'device_memory'"),
    ],
)
def test_bad_arguments(net: nn.Module, inputs: Tensor, arguments: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        zinf_compile.verify(net, inputs, **arguments)


def test_models_that_cannot_be_verified(inputs: Tensor, tmp_path: Path) -> None:
    with torch.device("meta"), pytest.raises(ConfigError, match="plain PyTorch needs values"):
        zinf_compile.verify(Net(), inputs)
    with pytest.raises(ConfigError, match=r"verify takes a torch.nn.Module, not str"):
        zinf_compile.verify("model", inputs)  # type: ignore[arg-type]
    model = zinf_compile.optimize(Net(), nvme=tmp_path, **BUDGETS)
    with pytest.raises(ConfigError, match="was optimized already"):
        zinf_compile.verify(model, inputs)
    zinf_compile.close(model)


def verdict_with(tiers: Sequence[TierReport], process: ProcessReport | None) -> verification.Verdict:
    return verification.Verdict(
        model="Net", num_steps=1, num_compared=1, differing=(), rounding=None, tiers=tuple(tiers), process=process
    )


def test_what_is_beyond_its_budgets() -> None:
    tier = TierReport(tier=Tier.DEVICE, capacity=4, predicted_peak=3, measured_peak=3 + 2**20)
    assert verdict_with([tier], None).is_within_budgets
    exceeded = TierReport(tier=Tier.DEVICE, capacity=4, predicted_peak=2, measured_peak=3 + 2**20)
    verdict = verdict_with([exceeded], None)
    assert not verdict.is_within_budgets
    assert "1.0 MiB of 2 B promised, exceeded" in str(verdict)
    assert str(verdict).endswith("verdict: right, but beyond what was promised")
    assert not verdict_with([tier], ProcessReport(budget=2, reserved=0, measured_peak=3)).is_within_budgets
