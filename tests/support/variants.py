"""Which variants of a parametrized test run in `make test-long`: those in which each value of each parameter occurs.

A test of seven models in six placements has 42 variants that run nearly the same lines. Ten of them have every model and
every placement. ``ZINF_VARIANTS=all`` runs all, as `make test-all` does.
"""

import os
from collections.abc import Hashable, Mapping, Sequence
from zlib import crc32

VARIABLE = "ZINF_VARIANTS"


def are_all_wanted() -> bool:
    """Return whether all variants run."""
    return os.environ.get(VARIABLE, "all") == "all"


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
