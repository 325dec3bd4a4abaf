"""Which variants of a parametrized test run in `make test`: those in which each value of each parameter occurs.

A test of seven models in six placements has 42 variants that run nearly the same lines. Ten of them have every model and
every placement. The others are marked ``long("all variants")`` and run in `make test-long`. Of tests that are ``long``
themselves, it runs variants chosen in the same way. ``ZINF_VARIANTS=all`` runs all, as `make test-all` does.

``ZINF_PART=2/6`` runs the second sixth of all tests that are asked for, by their names: CI, which has no time for all long
ones, runs other parts of them after each commit.
"""

import os
from collections.abc import Callable, Hashable, Mapping, Sequence
from zlib import crc32

import pytest

VARIABLE = "ZINF_VARIANTS"
PART = "ZINF_PART"
ALL_VARIANTS = "all variants"  # an argument of the mark ``long``: `make test-long` leaves out none of them


@pytest.hookimpl(tryfirst=True)  # before `-m` deselects, and behind what folders mark
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark variants as ``long`` if each of their values occurs in a variant that is not."""
    for item in _find_surplus(items, lambda item: item.get_closest_marker("long") is None):
        item.add_marker(pytest.mark.long(ALL_VARIANTS))


def find_surplus_long(items: Sequence[pytest.Item]) -> list[pytest.Item]:
    """Return the variants of ``long`` tests that `make test-long` leaves out: their values occur in other variants."""
    return _find_surplus(items, _may_be_left_out)


def _may_be_left_out(item: pytest.Item) -> bool:
    marks = list(item.iter_markers("long"))
    return bool(marks) and not any(ALL_VARIANTS in mark.args for mark in marks)


def _find_surplus(items: Sequence[pytest.Item], do_count: Callable[[pytest.Item], bool]) -> list[pytest.Item]:
    """Return the variants that ``choose_variants`` leaves out of those of each test for which ``do_count`` is true."""
    variants: dict[tuple[object, str], dict[str, Mapping[str, object]]] = {}
    for item in items:
        if isinstance(item, pytest.Function) and hasattr(item, "callspec") and do_count(item):
            variants.setdefault((item.path, item.originalname), {})[item.nodeid] = item.callspec.params
    surplus = {name for each in variants.values() for name in each.keys() - set(choose_variants(each))}
    return [item for item in items if item.nodeid in surplus]


def are_all_wanted() -> bool:
    """Return whether all variants run."""
    return os.environ.get(VARIABLE, "all") == "all"


def is_in_part(name: str) -> bool:
    """Return whether a test is in the part that runs, by its name."""
    number, _, of = os.environ.get(PART, "1/1").partition("/")
    return crc32(name.encode()) % int(of) == int(number) - 1


def choose_variants(variants: Mapping[str, Mapping[str, object]]) -> Sequence[str]:
    """Return the names of the variants to run, given the values of each by parameter.

    They are chosen in an order that names alone decide, so that a new variant seldom changes the others.
    """
    chosen: list[str] = []
    covered: set[Hashable] = set()
    for name in sorted(variants, key=lambda name: crc32(name.encode())):
        values = {(parameter, repr(value)) for parameter, value in variants[name].items()}
        if not values <= covered:
            covered |= values
            chosen.append(name)
    return chosen
