"""Memory for disk I/O is of large pages where the system has them: pinning small ones took half of a step's system time."""

import ctypes
import mmap
import re
from pathlib import Path

import pytest

from zinf_compile.runtime.device import host_mapping

_THP = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def test_pages_are_large_and_counted_from_the_start() -> None:
    if not _THP.exists() or "[never]" in _THP.read_text():
        pytest.skip("this system has no transparent huge pages")
    nbytes = 64 * 2**20
    memory = host_mapping.map_memory(nbytes)
    fields = _fields_of(memory)
    assert _kibibytes(fields, "Rss") * 1024 >= nbytes
    assert _kibibytes(fields, "AnonHugePages") * 1024 >= nbytes // 2


def test_pages_are_touched_where_the_system_cannot_populate_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_mapping, "_MADV_POPULATE_WRITE", 9999)  # as on a Linux before 5.14, which does not know it
    nbytes = 5 * 2**20 + mmap.PAGESIZE
    memory = host_mapping.map_memory(nbytes)
    assert _kibibytes(_fields_of(memory), "Rss") * 1024 >= nbytes
    assert bytes(memory) == bytes(nbytes)


def _fields_of(memory: mmap.mmap) -> str:
    """Return what the system says of the mapping that has the memory."""
    address = ctypes.addressof(ctypes.c_ubyte.from_buffer(memory))
    mappings = re.split(r"^(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text(), flags=re.MULTILINE)
    ranges = {tuple(int(end, 16) for end in each.split(" ", 1)[0].split("-")): each for each in mappings if each}
    return next(each for (first, stop), each in ranges.items() if first <= address < stop)


def _kibibytes(fields: str, name: str) -> int:
    found = re.search(rf"^{name}:\s+(\d+) kB", fields, flags=re.MULTILINE)
    assert found is not None
    return int(found[1])
