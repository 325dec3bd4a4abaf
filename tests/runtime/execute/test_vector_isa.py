"""Inductor gets the widest vector instructions that work, and no probe of narrower ones is compiled."""

from collections.abc import Iterator

import pytest
from torch._inductor import config, cpu_vec_isa

from zinf_compile.runtime.execute import vector_isa
from zinf_compile.runtime.execute.vector_isa import probe_widest_first


class Isa(cpu_vec_isa.VecISA):
    def __init__(self, name: str, *, works: bool, width: int, probed: list[str]) -> None:
        self._name, self._works, self._bit_width, self._probed = name, works, width, probed

    def __str__(self) -> str:
        return self._name

    def __bool__(self) -> bool:
        self._probed.append(self._name)
        return self._works


@pytest.fixture
def probed(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Return the names of probed instruction sets, on a processor with three; the compiler lacks the widest."""
    probed: list[str] = []
    sets = [("amx", False, 512), ("wide", True, 512), ("narrow", True, 256), ("other machine", True, 128)]
    known = [Isa(name, works=works, width=width, probed=probed) for name, works, width in sets]
    monkeypatch.setattr(cpu_vec_isa, "supported_vec_isa_list", known)
    monkeypatch.setattr(cpu_vec_isa, "x86_isa_checker", lambda: ["amx", "wide", "narrow"])
    monkeypatch.delenv("ATEN_CPU_CAPABILITY", raising=False)
    caches = (cpu_vec_isa.valid_vec_isa_list, vector_isa._widest)
    for cached in caches:
        cached.cache_clear()
    yield probed
    for cached in caches:
        cached.cache_clear()


def test_probing_ends_with_the_first_that_works(probed: list[str]) -> None:
    with probe_widest_first():
        assert str(cpu_vec_isa.pick_vec_isa()) == "wide"
        assert str(cpu_vec_isa.pick_vec_isa()) == "wide"
    assert probed == ["amx", "wide"]
    assert [str(isa) for isa in cpu_vec_isa.valid_vec_isa_list()] == ["wide", "narrow"]  # torch's own list is as before


def test_who_asks_for_a_width_gets_it(probed: list[str]) -> None:
    with config.patch({"cpp.simdlen": 256}), probe_widest_first():
        assert str(cpu_vec_isa.pick_vec_isa()) == "narrow"
    assert probed == ["amx", "wide", "narrow"]


def test_without_any_there_are_no_vectors(probed: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_vec_isa, "supported_vec_isa_list", cpu_vec_isa.supported_vec_isa_list[:1])
    with probe_widest_first():
        assert cpu_vec_isa.pick_vec_isa() is cpu_vec_isa.invalid_vec_isa
    assert probed == ["amx"]
