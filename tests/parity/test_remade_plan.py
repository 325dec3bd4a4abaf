"""A deliberately wrong profile that steps correct: plan and homes change during training, no bit does."""

import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zinf_compile
from examples.gpt import GPT, GPTConfig
from zinf_compile.hardware.observed import BusyTime, Observed, RouteBytes
from zinf_compile.ir.glossary import Tier
from zinf_compile.ir.hardware import Hardware, Rate, make_route
from zinf_compile.runtime.observe.watch import StepWatch
from zinf_compile.runtime.params.records import record_of

MIB = 2**20
STEPS = 6
BUDGETS = {"device_memory": "8MiB", "host_memory": "12MiB"}


def machine(*, disk: float, memory: float) -> Hardware:
    """Return a machine whose disk and host memory are reached at these bytes per second."""
    pairs = [(source, target) for source in Tier for target in Tier if source is not target]
    return Hardware(
        name="paper",
        unified=True,
        flops=(Rate(name="float32", per_second=1e10),),
        memory_bytes_per_second=1e10,
        routes=tuple(make_route(*pair, disk if Tier.NVME in pair else memory) for pair in pairs),
        optimizer_elements_per_second=1e9,
    )


WRONG = machine(disk=1e12, memory=1e6)  # as if host memory were the slow tier
RIGHT = machine(disk=1e8, memory=1e12)


def shown_by(right: Hardware, *, num_steps: int) -> Observed:
    """Return what steps observe on a machine with the routes of ``right`` and the compute rates of ``WRONG``."""
    return Observed(
        num_steps=num_steps,
        compute_seconds=0.01,
        step_seconds=0.5,
        moved=tuple(RouteBytes(route.name, 64 * MIB) for route in right.routes),
        busy=tuple(BusyTime((route.name,), 64 * MIB / route.bytes_per_second) for route in right.routes),
    )


@pytest.fixture
def wrong_profile(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plan with the wrong rates, and observe fixed ones, whatever this machine does meanwhile."""
    look = StepWatch.look

    def look_at(watch: StepWatch, agree: Callable[[bool], bool]) -> Observed | None:
        observed = look(watch, agree)
        return None if observed is None else shown_by(RIGHT, num_steps=observed.num_steps)

    monkeypatch.setattr("zinf_compile.driver.session.find_measured", lambda nvme, dtypes: WRONG)
    monkeypatch.setattr("zinf_compile.runtime.observe.watch._LEAST_SECONDS", 0.0)
    monkeypatch.setattr(StepWatch, "look", look_at)


def gpt():
    generator = torch.Generator().manual_seed(1)
    tokens = [torch.randint(4, 64, (2, 33), generator=generator) for _ in range(STEPS)]
    torch.manual_seed(0)
    model = GPT(GPTConfig(vocab_size=64, layers=4, hidden=128, heads=2, seq=32))
    return model, [{"tokens": each[:, :-1], "targets": each[:, 1:]} for each in tokens]


def homes(model: nn.Module) -> dict[Tier, int]:
    """Return the bytes at home on each tier, summed over the slots."""
    records = [record_of(parameter) for parameter in model.parameters()]
    slots = [
        slot
        for record in records
        if record is not None
        for slot in {
            id(each): each for each in (record.copies.compute, record.copies.master, record.gradient.slot)
        }.values()
        if slot is not None
    ] + [slot for record in records if record is not None for slot in record.copies.states.values()]
    return {tier: sum(slot.nbytes for slot in slots if slot.tier is tier) for tier in Tier}


@pytest.mark.of_a_cpu(reason="its profile is that of a machine with one memory")
@pytest.mark.usefixtures("wrong_profile")
@pytest.mark.parametrize("options", [{}, pytest.param({"overlap_step": False}, marks=pytest.mark.long)], ids=str)
def test_another_plan_after_the_third_step_changes_no_bit(
    parity: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture, options: dict[str, object]
) -> None:
    model, batches = gpt()
    parity.optimize(model, **BUDGETS, nvme=tmp_path, **options)
    seen = []

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        value = model(**batch)
        seen.append(homes(model))
        return value

    with caplog.at_level(logging.INFO, logger="zinf_compile"):
        ours = parity.train(model, batches, loss=loss)
    parity.assert_plain(ours, parity.plain_runs(gpt), captured=True)
    report = zinf_compile.report(model)
    (sentence,) = report.replanned
    assert re.search(
        r"GPT graph 0: planned again after step 3: predicted .* s, measured 0.5 s, .*; new plan .* s", sentence
    )
    assert [record.message for record in caplog.records if "planned again" in record.message] == [sentence]
    assert sentence in str(report)
    # The new plan is adopted once, between steps: homes move before the fourth forward, and stay there.
    assert seen[1] == seen[2] != seen[3] == seen[5]
    (plan,) = report.plans
    assert {tier: sum(item.nbytes_on(tier) for item in plan.placements) for tier in Tier} == seen[3]
    assert plan.hardware.route(Tier.NVME, Tier.DEVICE).bytes_per_second == pytest.approx(1e8)
    for tier in report.tiers[1:]:  # tests/memory measures the device
        assert tier.measured_peak <= tier.predicted_peak, tier
    assert next(phase for phase in report.phases).count == STEPS - 3


@pytest.mark.of_a_cpu(reason="its profile is that of a machine with one memory")
@pytest.mark.usefixtures("wrong_profile")
def test_a_new_plan_counts_less_state(tmp_path: Path) -> None:
    """SGD without momentum keeps nothing: by the measured plan, what AdamW would keep is free for other copies."""
    plain, batches = gpt()
    model, _ = gpt()
    zinf_compile.optimize(model, **BUDGETS, nvme=tmp_path)
    seen = []
    for each in (plain, model):
        optimizer = torch.optim.SGD(each.parameters(), lr=0.1)
        for batch in batches:
            each(**batch).backward()
            optimizer.step()
            optimizer.zero_grad()
            if each is model:
                (view,) = zinf_compile.report(model).plans
                seen.append(sum(item.optimizer_state_nbytes for item in view.plan.placements))
    for name, value in plain.state_dict().items():
        assert torch.equal(value, model.state_dict()[name]), name
    assert seen[2] > 0
    assert seen[3:] == [0, 0, 0]
    (sentence,) = zinf_compile.report(model).replanned
    assert "planned again after step 3" in sentence
    zinf_compile.close(model)
