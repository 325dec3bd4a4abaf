"""One graph for inputs of changing shapes is bitwise equal to plain PyTorch. Plans grow; too large inputs are refused."""

import copy
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zinf_compile
from zinf_compile.inspect.reports import Report
from zinf_compile.ir.errors import CapacityError

VOCABULARY = 50


class Reader(nn.Module):
    """Attention, a convolution that halves the sequence, and a loss: symbolic products, quotients and squares of sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 64)
        self.qkv = nn.Linear(64, 192)
        self.fold = nn.Conv1d(64, 64, 3, padding=1, stride=2)
        self.head = nn.Linear(64, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        query, key, value = self.qkv(x).unflatten(2, (3, 4, 16)).permute(2, 0, 3, 1, 4)
        x = x + nn.functional.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2)
        folded = self.fold(x.transpose(1, 2)).sigmoid().mean()
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), ids.flatten()) + folded


def make_model() -> Reader:
    """Return the same model at every call."""
    torch.manual_seed(0)
    return Reader()


def make_batches(shapes: Sequence[tuple[int, int]]) -> list[dict[str, Tensor]]:
    """Return token ids of these shapes."""
    generator = torch.Generator().manual_seed(1)
    return [{"ids": torch.randint(VOCABULARY, shape, generator=generator)} for shape in shapes]


def compile_zinf(model: nn.Module, folder: Path, **options: Any) -> Any:
    """Compile without saying whether shapes change, as most users do."""
    budgets = {"device_memory": "256MiB", "host_memory": "2MiB", "nvme": str(folder), **options}
    return torch.compile(model, backend="zinf", options=budgets)


GROWING = [(2, 24), (2, 330), (2, 390), (2, 800)]
SHRINKING = [(4, 500), (4, 490), (4, 320), (4, 24)]


@pytest.mark.parametrize(
    "shapes", [GROWING, pytest.param(SHRINKING, marks=pytest.mark.long)], ids=["growing", "shrinking"]
)
def test_every_bit_is_as_in_plain_pytorch(parity: Any, tmp_path: Path, shapes: list[tuple[int, int]]) -> None:
    batches, plain = make_batches(shapes), make_model()
    torch.manual_seed(0)
    expected = parity.train(plain, batches, loss=_loss_of(plain))
    model = make_model()
    report = parity.check_compiled(compile_zinf(model, tmp_path), model, batches, lambda _: expected)
    changing = [plan for plan in report.plans if plan.request.captured[0].symbols]
    assert changing
    assert all(plan.bound for plan in changing)
    _assert_within_plan(report)
    # A graph is planned again each time it grows, and never after it has seen its largest shape.
    assert bool(report.replanned) == (shapes is GROWING), report.replanned


def _loss_of(compiled: Any) -> Any:
    return lambda _, batch: compiled(**batch)


def _assert_within_plan(report: Report) -> None:
    """Assert that no tier but the device took more than was planned; tests/memory measures the device."""
    for tier in report.tiers[1:]:
        assert tier.measured_peak <= tier.predicted_peak


def test_an_input_too_large_is_refused_before_anything_runs(parity: Any, tmp_path: Path) -> None:
    model = make_model()
    compiled = compile_zinf(model, tmp_path, device_memory="2MiB", recompute=False)
    parity._models.append(model)
    first, second, large = make_batches([(2, 24), (2, 130), (2, 3000)])
    for batch in (first, second):
        compiled(**batch).backward()
    gradient = model.head.weight.grad.clone()
    before = zinf_compile.report(model)
    with pytest.raises(CapacityError) as refused:
        compiled(**large)
    found = re.search(
        r"this call has sequence=3000, and .* is planned for sequence=130; the largest sequence that fits is (\d+); "
        r".* needs .* raise device_memory to (\d+MiB)",
        str(refused.value),
    )
    assert found is not None, str(refused.value)
    after = zinf_compile.report(model)
    assert (after.plans, after.moved, after.replanned) == (before.plans, before.moved, ())
    assert torch.equal(model.head.weight.grad, gradient)
    # The length that the error names does fit.
    largest = int(found[1])
    (fits,) = make_batches([(2, largest)])
    compiled(**fits).backward()
    with pytest.raises(CapacityError, match=f"is planned for sequence={largest}; the largest sequence"):
        compiled(**large)
    compiled(**first).backward()  # the model still trains


def test_a_backward_may_come_after_a_larger_forward(parity: Any, tmp_path: Path) -> None:
    shapes = [(2, 24), (2, 230)]

    def run(model: nn.Module, compiled: Any) -> list[Tensor]:
        for batch in make_batches(shapes):
            compiled(**batch).backward()
        small, large = make_batches([(2, 60), (2, 1600)])
        first = compiled(**small)
        second = compiled(**large)
        first.backward()
        second.backward()
        return [parameter.grad.clone() for parameter in model.parameters()]

    plain = make_model()
    expected = run(plain, plain)
    model = make_model()
    parity._models.append(model)
    for ours, theirs in zip(run(model, compile_zinf(model, tmp_path)), expected, strict=True):
        parity.assert_equal(ours, theirs, "gradient")
    assert len(zinf_compile.report(model).replanned) == 1


def test_by_default_growing_lengths_share_a_plan_where_no_gradient_is_wanted():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))
    plain = copy.deepcopy(model)
    zinf_compile.optimize(model, compute="inductor", device_memory="8MiB", host_memory="8MiB")
    model(torch.randn(2, 3, 16)).sum().backward()
    with torch.no_grad():
        for length in (4, 5, 7, 9, 12, 16):
            x = torch.randn(2, length, 16)
            torch.testing.assert_close(model(x), plain(x))
    training, *generating = zinf_compile.report(model).plans
    assert training.schedule.is_training
    assert len(generating) <= 2  # one for the first length, one for all others
    zinf_compile.close(model)
