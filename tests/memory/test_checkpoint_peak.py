"""Saving and loading take constant memory and bypass the page cache: 96 MiB through 4 MiB, in a fork of its own."""

from collections.abc import Callable
from typing import Any

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.long]

MIB = 2**20
HOST_MEMORY = 8 * MIB  # staging is half of it
SLACK = 3 * MIB  # thread stacks, names, Python's allocations; far less than all tensors together

SCRIPT = """
import ctypes, mmap, re, time
from pathlib import Path

from zinf_compile.runtime.process.ram import return_freed_memory

peaks, record = {"anonymous": 0, "staging": 0}, {}


def status(field):
    return int(re.search(field + r":\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) * 1024


def sample(staging):
    while True:
        peaks["anonymous"] = max(peaks["anonymous"], status("RssAnon"))
        peaks["staging"] = max(peaks["staging"], staging.held_nbytes)
        time.sleep(0.002)


def cached(path):
    with open(path, "r+b") as file, mmap.mmap(file.fileno(), 0) as mapped:
        pages = (len(mapped) + mmap.PAGESIZE - 1) // mmap.PAGESIZE
        vector = (ctypes.c_ubyte * pages)()
        address = ctypes.addressof(ctypes.c_char.from_buffer(mapped))
        assert ctypes.CDLL(None).mincore(ctypes.c_void_p(address), ctypes.c_size_t(len(mapped)), vector) == 0
        return sum(page & 1 for page in vector) * mmap.PAGESIZE


def note(name, folder, call):
    gc.collect()
    return_freed_memory()  # what is free in the heap would hide as much of what is allocated later
    before = status("RssAnon"), status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    peaks.update(anonymous=0, staging=0)
    start = time.perf_counter()
    call()
    seconds = time.perf_counter() - start
    record[name] = {
        "anonymous": max(peaks["anonymous"], status("RssAnon")) - before[0], "resident": status("VmHWM") - before[1],
        "seconds": seconds, "cached": sum(map(cached, (folder / "saved").glob("data-*/*.safetensors"))),
        "staging": peaks["staging"],
    }


def measure(case):
    torch.set_num_threads(1)
    folder = Path(case["nvme"])
    model = torch.nn.Sequential(*(torch.nn.Linear(1024, 512) if i % 2 else torch.nn.Linear(512, 1024) for i in range(16)))
    zinf_compile.optimize(model, device_memory="64MiB", host_memory=case["host_memory"], nvme=folder, capture=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model(torch.ones(2, 512)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    zinf_compile.save(folder / "warm", torch.nn.Linear(2, 2))  # imports and the first thread's stack
    zinf_compile.load(folder / "warm", torch.nn.Linear(2, 2))
    staging = next(model.parameters())._zinf_record.store.staging
    threading.Thread(target=sample, args=[staging], daemon=True).start()
    note("save", folder, lambda: zinf_compile.save(folder / "saved", model, optimizer))
    note("load", folder, lambda: zinf_compile.load(folder / "saved", model, optimizer))
    record["nbytes"] = sum(path.stat().st_size for path in (folder / "saved").glob("data-*/*"))
    record["direct"] = "O_DIRECT" in next(model.parameters())._zinf_record.store.engine.describe()
    return record
"""


@pytest.fixture(scope="module")
def measured(measure: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    case = {"nvme": str(tmp_path_factory.mktemp("store")), "host_memory": HOST_MEMORY}
    record: dict[str, Any] = measure(SCRIPT, case)
    return record


@pytest.mark.parametrize("call", ["save", "load"])
def test_memory_does_not_grow_with_the_model(measured: dict[str, Any], call: str) -> None:
    assert measured["nbytes"] > 95 * MIB
    assert measured[call]["anonymous"] <= HOST_MEMORY // 2 + SLACK
    assert measured[call]["resident"] <= HOST_MEMORY // 2 + SLACK
    assert 0 < measured[call]["staging"] <= HOST_MEMORY // 2


@pytest.mark.parametrize("call", ["save", "load"])
def test_nothing_stays_in_the_page_cache(measured: dict[str, Any], call: str) -> None:
    if not measured["direct"]:
        pytest.skip("this folder's filesystem refuses O_DIRECT")
    assert measured[call]["cached"] <= MIB, "only the tail of a file may stay cached"
