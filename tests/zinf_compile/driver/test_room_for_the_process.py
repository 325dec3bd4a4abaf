"""A captured graph whose process takes more than was reserved: planned again, refused before its first run, or kept."""

import logging
import re
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zinf_compile
from zinf_compile.driver import session
from zinf_compile.driver.program import Program
from zinf_compile.ir.errors import CapacityError
from zinf_compile.ir.glossary import Tier
from zinf_compile.ir.plan import TierPart
from zinf_compile.runtime.native.compiled import find_compiler
from zinf_compile.runtime.process import reserve
from zinf_compile.runtime.store.held_memory import HeldMemory

MIB = 2**20
BUDGETS = {"device_memory": "160MiB", "host_memory": "96MiB", "reserve_memory": "auto", "compute": "aten"}


class Layers(nn.Sequential):
    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__(nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 32))


Layers.__name__ = "Layers\nand more"


@pytest.fixture
def hold(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Return a function that sets how many bytes the process holds besides models."""

    def hold(nbytes: int) -> None:
        monkeypatch.setattr(HeldMemory, "reserve_needed", lambda self: nbytes)

    hold(20 * MIB)
    return hold


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> list[Tensor]:
    losses = []
    for _ in range(steps):
        loss = model(torch.ones(4, 32)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses


def optimized(**options: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = zinf_compile.optimize(Layers(), **{**BUDGETS, **options})
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def reserved(model: nn.Module) -> int:
    (plan,) = zinf_compile.report(model).plans
    return plan.tier(Tier.DEVICE).nbytes_of(TierPart.RESERVE)


def test_a_process_that_grows_is_planned_for(hold: Callable[[int], None]) -> None:
    model, optimizer = optimized()
    train(model, optimizer, 1)
    before = reserved(model)
    hold(before + MIB)
    train(model, optimizer, 1)
    assert before < reserved(model) < before + 32 * MIB
    zinf_compile.close(model)


def test_a_process_that_outgrows_the_budget_keeps_its_plan_and_says_so_once(
    hold: Callable[[int], None], caplog: pytest.LogCaptureFixture
) -> None:
    plain = Layers()
    expected = train(plain, torch.optim.AdamW(plain.parameters(), lr=1e-2), 4)
    model, optimizer = optimized()
    losses = train(model, optimizer, 1)
    before = reserved(model)
    hold(300 * MIB)
    with caplog.at_level(logging.WARNING):
        losses += train(model, optimizer, 3)
    assert reserved(model) == before
    assert all(map(torch.equal, losses, expected))
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 1
    assert said[0].startswith("Layers\\nand more graph 0: the process takes 312.0 MiB, and its plan stays: ")
    assert "raise device_memory to 313MiB" in said[0]
    report = zinf_compile.report(model)
    assert len(report.replanned) == 1
    assert "the process takes 312.0 MiB, and its plan stays" in str(report)
    zinf_compile.close(model)


def test_before_the_first_run_it_is_refused_and_the_budget_that_is_named_works(hold: Callable[[int], None]) -> None:
    """As where compiling has left behind more than was expected: the plan was made before, and nothing has run."""
    model, _ = optimized(device_memory="100MiB", host_memory="156MiB")
    hold(93 * MIB)
    with pytest.raises(CapacityError, match="as measured; reserve_memory=0 keeps budgets for the model only") as caught:
        model(torch.ones(4, 32))
    zinf_compile.close(model)
    named = re.search(r"raise device_memory to (\w+)", str(caught.value))
    assert named is not None
    model, optimizer = optimized(device_memory=named[1], host_memory="156MiB")
    train(model, optimizer, 3)
    assert reserved(model) >= 93 * MIB
    assert not zinf_compile.report(model).replanned
    zinf_compile.close(model)


def test_what_steps_may_add_is_not_waited_for_where_there_is_no_room(hold: Callable[[int], None]) -> None:
    model, optimizer = optimized(device_memory="100MiB", host_memory="156MiB")
    hold(80 * MIB)  # 104 MiB with what steps are expected to add, 88 without
    train(model, optimizer, 1)
    assert reserved(model) == 88 * MIB
    zinf_compile.close(model)


@pytest.mark.skipif(find_compiler() is None, reason="there is no C++ compiler on the PATH")
def test_a_graph_that_fits_only_if_it_is_not_compiled_runs_op_by_op(
    hold: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reserve, "_EXPECTED", {"aten": 40 * MIB, "inductor": 200 * MIB})
    programs: list[weakref.ref[Program]] = []
    alive: list[int] = []  # when each program is made: how many captures of earlier ones are still held

    def make_program(*args: Any, **options: Any) -> Program:
        alive.append(sum(program() is not None for program in programs))
        made = Program(*args, **options)
        programs.append(weakref.ref(made))
        return made

    monkeypatch.setattr(session, "Program", make_program)
    plain = Layers()
    expected = train(plain, torch.optim.AdamW(plain.parameters(), lr=1e-2), 2)
    model, optimizer = optimized(compute="inductor")
    assert all(map(torch.equal, train(model, optimizer, 2), expected))
    (fallback,) = zinf_compile.report(model).fallbacks
    assert "runs op by op: compiling would leave the process 224.0 MiB of device_memory" in fallback
    assert reserved(model) < 100 * MIB
    assert alive == [0, 0]  # the process would hold both
    zinf_compile.close(model)
