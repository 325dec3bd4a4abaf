"""Selects the vector instructions for Inductor's C++: the widest that work, without probing narrower ones.

torch compiles and loads a probe for every instruction set of the processor, which takes seconds each at the very first
compilation, and uses the first that works. If ``ATEN_CPU_CAPABILITY`` or ``simdlen`` asks for another, torch's full
list is used.
"""

import functools
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock


@contextmanager
def probe_widest_first() -> Iterator[None]:
    """In this block, let Inductor probe vector instruction sets only until one works."""
    from torch._inductor import config, cpu_vec_isa  # imports Inductor, which is needed only to compile

    needed = ("valid_vec_isa_list", "supported_vec_isa_list", "x86_isa_checker")
    is_chosen = config.cpp.simdlen is not None or "ATEN_CPU_CAPABILITY" in os.environ
    if is_chosen or not all(hasattr(cpu_vec_isa, name) for name in needed) or not cpu_vec_isa.x86_isa_checker():
        yield
        return
    with mock.patch.object(cpu_vec_isa, "valid_vec_isa_list", _widest):
        yield


@functools.cache
def _widest() -> list[Any]:
    """Return a list with the first x86 instruction set that works, in the form of torch's list of all."""
    from torch._inductor import cpu_vec_isa

    flags = cpu_vec_isa.x86_isa_checker()
    known = (isa for isa in cpu_vec_isa.supported_vec_isa_list if all(flag in flags for flag in str(isa).split()))
    return [isa for isa in [next(filter(bool, known), None)] if isa is not None]
