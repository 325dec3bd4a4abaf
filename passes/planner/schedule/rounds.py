"""Which rank has which parameters where ranks work in rounds: stages of about equal work, dealt out in turn.

Every rank computes its stages for the batches of all ranks. So a pass through the model takes as long as the work of one
rank, and what the first batch needs to reach the last rank once::

    rank 0    0.1  0.0  2.1  2.0                 stage.batch, of two ranks and four stages
    rank 1         1.1  1.0  3.1  3.0
"""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from zinf_compile.ir.errors import ConfigError


class Dealt(NamedTuple):
    """A parameter that is dealt out."""

    name: str
    block: str  # the entry of a ModuleList or Sequential that it is in; "" for none
    num_elements: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Deal:
    """The stages of a model: the names of the parameters of each, and how even their work is."""

    stages: tuple[tuple[str, ...], ...]
    num_ranks: int
    work: tuple[float, ...]  # of each stage: elements that it computes with
    efficiency: float  # work of a pass over what the ranks could do in that time: the rest is waiting

    @property
    def owners(self) -> Mapping[str, int]:
        """Return the rank of each parameter."""
        return {name: number % self.num_ranks for number, stage in enumerate(self.stages) for name in stage}


def deal_stages(parameters: Sequence[Dealt], num_ranks: int) -> Deal:
    """Return the stages of a model with these parameters, which are in the order of the program.

    A stage is one or several blocks, an entry of a ModuleList or Sequential each. What comes before the first block belongs
    to it, and what comes behind the last one is a block by itself. There are as many stages as make a pass shortest, by the
    elements of their parameters. ConfigError for fewer blocks than ranks.
    """
    units = _find_units(parameters)
    work = [float(sum(each.num_elements for each in unit.computed)) for unit in units]
    if len(units) < num_ranks:
        raise ConfigError(
            f"schedule='rounds' deals blocks of the model out to {num_ranks} ranks, and it has {len(units)}: entries of a "
            "ModuleList or Sequential; use fewer ranks, or leave schedule out, which shards the model (ZeRO stage 3)"
        )
    total = sum(work)
    best: tuple[float, list[list[int]]] | None = None
    for count in range(num_ranks, len(units) + 1):
        groups = _cut(work, count)
        seconds = pass_seconds([sum(work[unit] for unit in group) for group in groups], num_ranks)
        if best is None or seconds < best[0] * (1 - 1e-9):
            best = seconds, groups
    assert best is not None
    seconds, groups = best
    return Deal(
        stages=tuple(tuple(each.name for unit in group for each in units[unit].parameters) for group in groups),
        num_ranks=num_ranks,
        work=tuple(sum(work[unit] for unit in group) for group in groups),
        efficiency=total / seconds if seconds else 1.0,
    )


@dataclass(slots=True, kw_only=True)
class _Unit:
    """What is in one stage at least: a block, with what comes before the first one."""

    parameters: list[Dealt]
    computed: list[Dealt]  # those of its own, which tell how long it takes: what comes before is mostly looked up


def _find_units(parameters: Sequence[Dealt]) -> list[_Unit]:
    units: dict[str, _Unit] = {}
    before: list[Dealt] = []
    for each in parameters:
        if not each.block and not units:
            before.append(each)
            continue
        unit = units.setdefault(each.block, _Unit(parameters=before, computed=[]))
        before = []
        unit.parameters.append(each)
        unit.computed.append(each)
    return list(units.values())


def _cut(work: Sequence[float], count: int) -> list[list[int]]:
    """Return consecutive groups of units, so many, of which the largest is as small as it can be."""
    sums = [0.0]
    for each in work:
        sums.append(sums[-1] + each)
    least = {(0, 0): (0.0, 0)}  # the largest group of the first units in so many groups, and where the last one begins
    for groups in range(1, count + 1):
        for stop in range(groups, len(work) - (count - groups) + 1):
            least[groups, stop] = min(
                (max(least[groups - 1, start][0], sums[stop] - sums[start]), start)
                for start in range(groups - 1, stop)
                if (groups - 1, start) in least
            )
    cuts, stop = [len(work)], len(work)
    for groups in range(count, 0, -1):
        stop = least[groups, stop][1]
        cuts.append(stop)
    cuts.reverse()
    return [list(range(first, last)) for first, last in itertools.pairwise(cuts)]


def pass_seconds(stages: Sequence[float], num_ranks: int) -> float:
    """Return how long a pass of one batch of each rank takes, if a stage takes ``stages`` for a batch."""
    free, ready = [0.0] * num_ranks, [0.0] * num_ranks  # when a rank, and a batch, can go on
    for number, seconds in enumerate(stages):
        rank = number % num_ranks
        for batch in range(num_ranks):
            free[rank] = ready[batch] = max(free[rank], ready[batch]) + seconds
    return max(free)
