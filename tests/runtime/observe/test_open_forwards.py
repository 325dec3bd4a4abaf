"""Forwards whose backward has not run: their memory is known and planned for, and refused where there is no room."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zinf_compile
from zinf_compile.inspect.plan_view import PlanView
from zinf_compile.inspect.reports import Report
from zinf_compile.ir.errors import CapacityError
from zinf_compile.ir.glossary import Phase, Tier
from zinf_compile.ir.plan import TierPart
from zinf_compile.runtime.observe.open_forwards import OpenForwards, storages_of

KIB = 2**10
WIDTH, BATCH = 64, 512
VALUE = BATCH * WIDTH * 4  # bytes of each layer's output


def tensor(nbytes: int) -> Tensor:
    return torch.empty(nbytes, dtype=torch.uint8)


def test_what_is_saved_counts_until_it_is_dropped() -> None:
    forwards, given, result, saved = OpenForwards(), tensor(1), tensor(20), tensor(300)
    forwards.add(storages_of([given]), [result, 7], [given, saved.view(3, 100), saved, result])
    assert forwards.nbytes_beside() == 320
    assert forwards.nbytes_beside(storages_of([result])) == 300, "the graph that runs next counts its own inputs"
    del saved
    assert forwards.nbytes_beside() == 0, "backward has run, and a result that the user still holds does not count"


def test_what_a_new_tensor_has_is_not_taken_for_what_was_given() -> None:
    forwards, given = OpenForwards(), [tensor(KIB)]
    before = storages_of(given)
    given.clear()  # as a graph does with its boxed inputs
    saved = [tensor(KIB) for _ in range(8)]
    forwards.add(before, [], saved)
    assert forwards.nbytes_beside() == 8 * KIB


class Broken(nn.Module):
    """A graph break: two graphs in one forward."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = self._layers(), self._layers()

    def _layers(self) -> nn.Sequential:
        return nn.Sequential(*(layer for _ in range(3) for layer in (nn.Linear(WIDTH, WIDTH), nn.GELU())))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        torch._dynamo.graph_break()
        return self.second(x).square().mean()


@pytest.fixture
def model(optimize: Any) -> Iterator[nn.Module]:
    torch.manual_seed(0)
    yield optimize(Broken(), capture=True, device_memory="4MiB", host_memory="64MiB", remake_plan=False)
    torch._dynamo.reset()


def batch() -> Tensor:
    return torch.randn(BATCH, WIDTH)


def open_nbytes(plan: PlanView) -> int:
    return plan.tier(Tier.DEVICE).nbytes_of(TierPart.OPEN)


def promised(report: Report) -> int:
    return next(tier.predicted_peak for tier in report.tiers if tier.tier is Tier.DEVICE)


def test_a_second_graph_is_planned_beside_what_the_first_has_saved(model: nn.Module) -> None:
    model(batch()).backward()
    first, second = zinf_compile.report(model).plans
    assert open_nbytes(first) == 0
    assert open_nbytes(second) >= first.activations.saved_nbytes - 2 * VALUE  # except for its input and its result
    assert open_nbytes(second) > VALUE
    assert f"{TierPart.OPEN} " in str(second)


def test_a_second_forward_before_backward_is_planned_for(model: nn.Module) -> None:
    x = batch()
    model(x).backward()
    alone = promised(zinf_compile.report(model))
    loss = model(x) + model(x)
    first, second = zinf_compile.report(model).plans
    assert open_nbytes(second) >= open_nbytes(first) + VALUE > VALUE
    assert promised(zinf_compile.report(model)) > alone
    loss.backward()
    model(x).backward()
    assert zinf_compile.report(model).plans == (first, second), "nothing is open any more"


def test_forwards_that_stay_open_are_refused_before_they_run(model: nn.Module) -> None:
    x = batch()
    loss = model(x)
    loss.backward()
    gradients = [parameter.grad.clone() for parameter in model.parameters()]
    kept: list[Tensor] = []
    message = (
        r"forwards whose backward has not run hold \d.* raise device_memory to \dMiB .*run backward after each forward"
    )
    with pytest.raises(CapacityError, match=message):
        kept.extend(model(x) for _ in range(9))
    assert kept, "at least one forward has room"
    kept.clear()
    model.zero_grad()
    model(x).backward()
    assert all(map(torch.equal, gradients, (parameter.grad for parameter in model.parameters())))


def test_a_step_is_predicted_by_all_of_its_graphs_and_no_others(model: nn.Module) -> None:
    optimizer = torch.optim.AdamW(model.parameters())
    sizes = (BATCH // 2, BATCH, BATCH)
    for size in sizes:
        model(torch.randn(size, WIDTH)).backward()
        optimizer.step()
        optimizer.zero_grad()
    report = zinf_compile.report(model)
    assert len(report.plans) == 4
    assert report.step_plans == report.plans[2:]
    counts = {phase.phase: phase.count for phase in report.phases}
    assert counts == {Phase.FORWARD: len(sizes), Phase.BACKWARD: len(sizes), Phase.STEP: len(sizes)}
    assert report.step is not None
    assert report.step.predicted_seconds == pytest.approx(sum(phase.predicted_seconds for phase in report.phases))
