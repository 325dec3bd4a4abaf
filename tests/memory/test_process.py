"""The whole process stays within its budgets: reserve_memory="auto", the default, measures what is not the model.

Measured in a fork of a process that has imported and captured before: memory from before the fork is not the model's.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.long]

MIB = 2**20
DEVICE_MEMORY, HOST_MEMORY = 192 * MIB, 64 * MIB
EXAMPLES = Path(__file__).resolve().parents[2] / "examples"

SCRIPT = """
from zinf_compile.runtime.process.ram import anonymous_rss, return_freed_memory


def measure(case):
    sys.path.insert(0, case["examples"])
    from gpt import GPT, GPTConfig

    return_freed_memory()
    before, peak = anonymous_rss(), 0
    with torch.device("meta"):
        model = GPT(GPTConfig(vocab_size=512, layers=6, hidden=576, heads=9, seq=128))
    config.DEFAULT_RESERVE = config.MEASURED  # as it is outside of forks
    zinf_compile.optimize(model, init="reset", nvme=case["nvme"], **case["options"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    tokens = torch.randint(0, 512, (1, 129), generator=torch.Generator().manual_seed(0))
    stop = threading.Event()

    def sample():
        nonlocal peak
        while not stop.wait(0.001):
            peak = max(peak, anonymous_rss())

    thread = threading.Thread(target=sample)
    thread.start()
    try:
        for step in range(case["steps"]):
            loss = model(tokens[:, :-1], tokens[:, 1:])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        zinf_compile.synchronize(model)
    finally:
        stop.set()
        thread.join()
    report = zinf_compile.report(model)
    return {"peak": peak - before, "counted": report.process.measured_peak, "reserved": report.process.reserved,
            "fallbacks": report.fallbacks, "states": 16 * sum(p.numel() for p in model.parameters())}
"""


def test_the_process_stays_within_both_budgets(measure: Callable[..., Any], tmp_path: Path) -> None:
    budgets = {"device_memory": DEVICE_MEMORY, "host_memory": HOST_MEMORY}
    case = {"nvme": str(tmp_path), "examples": str(EXAMPLES), "steps": 3}
    default = measure(SCRIPT, {**case, "options": budgets})
    aten = measure(SCRIPT, {**case, "options": {"compute": "aten", **budgets}})
    none = measure(SCRIPT, {**case, "steps": 2, "options": {"compute": "aten", "reserve_memory": 0, **budgets}})
    for auto in (default, aten):
        assert auto["states"] > 1.4 * (DEVICE_MEMORY + HOST_MEMORY)
        assert auto["peak"] <= DEVICE_MEMORY + HOST_MEMORY < none["peak"]
        assert auto["counted"] <= DEVICE_MEMORY + HOST_MEMORY
        assert 16 * MIB <= auto["reserved"] <= 3 * DEVICE_MEMORY // 4
        assert not auto["fallbacks"]
    assert none["reserved"] == 0
