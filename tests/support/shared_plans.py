"""Tests of one run share plans: planning is pure, and most tests plan what an earlier one, or another process, has planned.

The key is all of the request, with what tests patch in modules of the planner; of classes, only ``Config.staging_memory``.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import MappingProxyType, ModuleType
from typing import Any
from unittest import mock

from tests.support.run_cache import made_once
from zinf_compile.driver import planning
from zinf_compile.ir.errors import CapacityError
from zinf_compile.ir.plan import Plan
from zinf_compile.passes.planner.search.planner import Request, Searches

_SIMPLE = (int, float, str, bool, type(None))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Refused:
    """A request that nothing fits: what its error is made from."""

    kind: type[CapacityError]
    lines: tuple[str, ...]
    numbers: dict[str, int]


@contextmanager
def shared_plans() -> Iterator[None]:
    """Make each plan once per run inside the block."""
    make_plan, at_first = planning.make_plan, _globals_of_the_planner()

    def make(request: Request, searches: Searches | None) -> Plan | _Refused:
        try:
            return make_plan(request, searches)
        except CapacityError as error:
            return _Refused(kind=type(error), lines=error.args, numbers=dict(vars(error)))

    def share(request: Request, searches: Searches | None = None) -> Plan:
        key = _key_of(request, at_first)
        if key is None:
            return make_plan(request, searches)
        found = made_once(key, lambda: make(request, searches))
        if isinstance(found, _Refused):
            raise found.kind(*found.lines, **found.numbers)
        return found

    with mock.patch.object(planning, "make_plan", share):
        yield


def _key_of(request: Request, at_first: MappingProxyType[tuple[str, str], Any]) -> str | None:
    """Return the key of a request; None if its plan may depend on something else, such as a patched function."""
    changed = {
        name: value
        for name, value in _globals_of_the_planner().items()
        if name in at_first and value is not at_first[name]
    }
    if not all(isinstance(value, _SIMPLE) for value in changed.values()):
        return None
    config = replace(request.config, nvme=None if request.config.nvme is None else ".")  # plans do not name the folder
    # ``captured`` is of use for questions about other plans only.
    key = repr((replace(request, captured=(), config=config), config.staging_memory, sorted(changed.items())))
    return None if " at 0x" in key else key


def _globals_of_the_planner() -> MappingProxyType[tuple[str, str], Any]:
    modules = [
        (name, module)
        for name, module in sys.modules.items()
        if name.startswith(("zinf_compile.passes.planner.", "zinf_compile.ir.")) and isinstance(module, ModuleType)
    ]
    return MappingProxyType({(name, each): value for name, module in modules for each, value in vars(module).items()})
