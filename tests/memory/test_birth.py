"""Initialisation and export in bounded memory, in a fork of its own: 320 MiB of parameters, budgets of a fifth of that."""

from collections.abc import Callable
from typing import Any

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.long]

MIB = 2**20
DEVICE_MEMORY, HOST_MEMORY = 48 * MIB, 16 * MIB

# Resident memory counts every page, including mapped files. Each stage is measured relative to its beginning.
SCRIPT = """
import re, time
from pathlib import Path

from zinf_compile.runtime.process.ram import return_freed_memory

peak, record = {"anonymous": 0}, {}


def status(field):
    return int(re.search(field + r":\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) * 1024


def sample():
    while True:
        peak["anonymous"] = max(peak["anonymous"], status("RssAnon"))
        time.sleep(0.005)


def note(name, call):
    gc.collect()
    return_freed_memory()  # what is free in the heap would hide as much of what is allocated later
    Path("/proc/self/clear_refs").write_text("5")
    before, anonymous = status("VmRSS"), status("RssAnon")
    peak["anonymous"] = anonymous
    done = call()
    record[name] = {"resident": status("VmHWM") - before, "anonymous": peak["anonymous"] - anonymous}
    return done


def build(num_layers=20):
    with torch.device("meta"):
        return torch.nn.Sequential(*(torch.nn.Linear(2048, 2048) for _ in range(num_layers)))


def measure(case):
    torch.set_num_threads(1)
    options, folder = {**case, "capture": False}, case["nvme"]
    threading.Thread(target=sample, daemon=True).start()
    weights = Path(folder, "weights")
    # What the first use of all this imports is not ours.
    small = zinf_compile.optimize(build(2), init="reset", **options)
    zinf_compile.export(small, Path(folder, "small"))
    torch.save(small.state_dict(), Path(folder, "small.pt"))
    zinf_compile.close(small)
    del small

    model = note("reset", lambda: zinf_compile.optimize(build(), init="reset", **options))
    record["parameters"] = sum(parameter.numel() * 4 for parameter in model.parameters())
    note("export", lambda: zinf_compile.export(model, weights, max_shard_size="100MB"))
    note("save", lambda: torch.save(model.state_dict(), Path(folder, "model.pt")))
    other = note("files", lambda: zinf_compile.optimize(build(), init=weights, **options))
    record["equal"] = [all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters()))]
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    state = torch.load(Path(folder, "model.pt"), mmap=True)
    for value in state.values():  # what reading the file costs is not what loading costs
        value.sum()
    note("load", lambda: other.load_state_dict(state))
    record["equal"].append(all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters())))
    return record
"""


@pytest.fixture(scope="module")
def measured(measure: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    budgets = {"device_memory": DEVICE_MEMORY, "host_memory": HOST_MEMORY}
    record: dict[str, Any] = measure(SCRIPT, {"nvme": str(tmp_path_factory.mktemp("store")), **budgets})
    assert record["parameters"] > 5 * (DEVICE_MEMORY + HOST_MEMORY)
    return record


@pytest.mark.parametrize("stage", ["reset", "export", "files", "load"])
def test_resident_memory_stays_within_the_budgets(stage: str, measured: dict[str, Any]) -> None:
    assert measured[stage]["resident"] <= DEVICE_MEMORY + HOST_MEMORY


def test_saving_a_state_dict_takes_no_memory_of_its_own(measured: dict[str, Any]) -> None:
    """It reads mapped pages of the store file, which the kernel can evict at any time."""
    assert measured["save"]["anonymous"] <= HOST_MEMORY


def test_what_was_saved_is_what_was_loaded(measured: dict[str, Any]) -> None:
    assert measured["equal"] == [True, True]  # from files, and from a state dict
