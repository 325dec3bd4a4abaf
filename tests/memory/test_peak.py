"""The memory bound, measured in a fork of its own: states of 500 MiB train within budgets of a third of that."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.long]

MIB = 2**20
DEVICE_MEMORY, HOST_MEMORY = 112 * MIB, 56 * MIB
RESERVE_MEMORY = 36 * MIB
EXAMPLES = Path(__file__).resolve().parents[2] / "examples"

# The baseline is what Python, torch and the graphs of a model this deep take. The peak is reset once the parameters have
# left RAM, and again after the first step, which traces and compiles: the bound is about training. Part of the device
# budget is reserved for what plans do not count: Python keeps the captured graphs and the plan (15 MiB here, by
# tracemalloc), oneDNN keeps half a MiB per shape of a matrix product (9 MiB here), and the heap of the system's allocator
# varies by up to 12 MiB from run to run.
SCRIPT = """
import re, time
from pathlib import Path

import zinf_compile.ir.glossary
from zinf_compile.runtime.process.ram import return_freed_memory


def status(field):
    return int(re.search(field + r":\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) * 1024


def moved():
    text = Path("/proc/self/io").read_text()
    return [int(re.search(field + r": (\\d+)", text)[1]) for field in ("read_bytes", "write_bytes")]


def reset():
    Path("/proc/self/clear_refs").write_text("5")
    peaks["anonymous"] = 0


peaks, record = {"anonymous": 0}, {}


def sample():
    while True:
        peaks["anonymous"] = max(peaks["anonymous"], status("RssAnon"))
        time.sleep(0.005)


def note(name):
    record[name] = {"anonymous": peaks["anonymous"], "resident": status("VmHWM"), "now": status("RssAnon")}


def optimize(model, folder, **budgets):
    # Op by op: what compiling leaves behind, of Inductor's and the compiler's, would want a larger reserve.
    zinf_compile.optimize(model, nvme=folder, compute="aten", compute_dtype=torch.bfloat16, **budgets)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)


def step(model, optimizer, tokens):
    loss = model(tokens[:, :-1], tokens[:, 1:])
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def measure(case):
    sys.path.insert(0, case["examples"])
    from gpt import GPT, GPTConfig

    # A twin as deep and a thirteenth as wide: its parameters are nothing, its graphs and what compiling imports are the
    # same. Few tokens: a CPU without instructions for bfloat16 multiplies it hundreds of times slower, and the states are
    # the same.
    tokens = torch.randint(0, 1024, (1, 9), generator=torch.Generator().manual_seed(0))
    twin, twin_optimizer = optimize(
        GPT(GPTConfig(vocab_size=1024, layers=4, hidden=64, heads=1, seq=256)),
        case["nvme"], device_memory="64MiB", host_memory="2MiB"
    )
    step(twin, twin_optimizer, tokens)
    zinf_compile.close(twin)
    gc.collect()
    return_freed_memory()  # what is free in the heap would hide as much of what is allocated later
    record.update(baseline=status("RssAnon"), baseline_resident=status("VmRSS"))
    threading.Thread(target=sample, daemon=True).start()

    model = GPT(GPTConfig(vocab_size=1024, layers=4, hidden=832, heads=13, seq=256))
    record["parameters"] = sum(parameter.numel() for parameter in model.parameters())
    record["twin"] = sum(parameter.numel() for parameter in twin.parameters())
    del twin, twin_optimizer
    torch._dynamo.reset()
    model, optimizer = optimize(model, case["nvme"], **case["budgets"])
    note("optimize")
    reset()
    losses = [step(model, optimizer, tokens)]
    zinf_compile.synchronize(model)
    note("first step")
    for index in range(2):
        reset()
        before = moved()
        losses.append(step(model, optimizer, tokens))
        zinf_compile.synchronize(model)  # the update in flight is a part of the step
        note(f"step {index}")
        record[f"step {index}"]["moved"] = [b - a for a, b in zip(before, moved())]
    report = zinf_compile.report(model)
    (plan,) = report.plans
    placements = {placement.parameter: placement for placement in plan.placements}
    record["losses"] = losses
    # Of updates ahead of their step, those that have not begun by then are not reloaded.
    record["reloaded"] = sum(
        placements[name].reloaded_nbytes(plan.plan.shadow_tier) for name in plan.step.ahead
    ) if plan.plan.shadow_tier is zinf_compile.ir.glossary.Tier.NVME else 0
    record["planned read"] = plan.step.nbytes_read + sum(
        transfer.nbytes for transfer in plan.gathers if transfer.source == "nvme"
    ) + plan.swapped_nbytes(zinf_compile.ir.glossary.Tier.NVME)
    record["planned write"] = plan.step.nbytes_written + sum(
        sink.nbytes for sink in plan.sinks if sink.destination == "nvme"
    ) + plan.swapped_nbytes(zinf_compile.ir.glossary.Tier.NVME)
    record["states"] = sum(
        getattr(placement, role) for placement in plan.placements
        for role in ("compute_nbytes", "master_nbytes", "gradient_nbytes", "optimizer_state_nbytes")
    )
    record["report"] = str(report)
    record["nvme"] = report.tiers[2].measured_peak
    return record
"""


@pytest.fixture(scope="module")
def measured(measure: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    budgets = {"device_memory": DEVICE_MEMORY, "host_memory": HOST_MEMORY, "reserve_memory": RESERVE_MEMORY}
    case = {"nvme": str(tmp_path_factory.mktemp("store")), "examples": str(EXAMPLES), "budgets": budgets}
    record: dict[str, Any] = measure(SCRIPT, case)
    print(record["report"])
    return record


def test_the_states_are_far_larger_than_the_budgets(measured: dict[str, Any]) -> None:
    assert measured["states"] > 500 * MIB
    assert measured["states"] > 2.5 * (DEVICE_MEMORY + HOST_MEMORY)


@pytest.mark.parametrize("index", [0, 1])
def test_a_step_stays_within_the_budgets(index: int, measured: dict[str, Any]) -> None:
    held = measured[f"step {index}"]["anonymous"] - measured["baseline"]
    assert held <= DEVICE_MEMORY + HOST_MEMORY, f"{held / MIB:.0f} MiB of anonymous memory above the baseline"


@pytest.mark.parametrize("index", [0, 1])
def test_mapped_files_do_not_stay_resident_either(index: int, measured: dict[str, Any]) -> None:
    held = measured[f"step {index}"]["resident"] - measured["baseline_resident"]
    assert held <= DEVICE_MEMORY + HOST_MEMORY, f"{held / MIB:.0f} MiB of resident memory above the baseline"


@pytest.mark.parametrize("index", [0, 1])
def test_the_disk_moves_what_the_plan_says(index: int, measured: dict[str, Any]) -> None:
    for moved, planned in zip(measured[f"step {index}"]["moved"], ("planned read", "planned write"), strict=True):
        assert 0.9 * (measured[planned] - measured["reloaded"]) <= moved <= 1.1 * measured[planned]


def test_it_learns(measured: dict[str, Any]) -> None:
    first, second, third = measured["losses"]
    assert first > second > third
