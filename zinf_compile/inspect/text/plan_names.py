"""Folds names of parameters and transfers of identical blocks into one: ``layers.{0..23}.up.weight``."""

import re
from collections import defaultdict
from collections.abc import Iterable
from typing import NamedTuple

_NUMBERED = re.compile(r"(?:.*_)?\d+")  # the component of a name that numbers blocks: "3" of layers.3, or "layer_3"


class NamePattern(NamedTuple):
    """A name split at its numbered component: ``layers.3.up.weight`` is ``layers``, no stem, 3, ``up.weight``."""

    prefix: str
    suffix: str


def cut_name(name: str) -> tuple[NamePattern, int | None]:
    """Return a name's pattern and its number; the number is None for a name without one."""
    parts = name.split(".")
    for index, part in enumerate(parts):
        if _NUMBERED.fullmatch(part):
            stem = part.rstrip("0123456789")
            rest = ["*" if _NUMBERED.fullmatch(each) else each for each in parts[index + 1 :]]
            prefix = "".join(f"{each}." for each in parts[:index]) + stem
            return NamePattern(prefix, ".".join(rest)), int(part[len(stem) :])
    return NamePattern(name, ""), None


def name_pattern(name: str) -> NamePattern:
    return cut_name(name)[0]


def join_name(prefix: str, numbers: Iterable[int], suffix: str) -> str:
    """Return ``layers.{0..3,7}.up.weight``."""
    runs: list[list[int]] = []
    for number in sorted(set(numbers)):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    texts = [f"{run[0]}..{run[-1]}" if len(run) > 2 else ",".join(map(str, run)) for run in runs]
    text = ",".join(texts)
    if len(runs) > 1 or (runs and len(runs[0]) > 1):
        text = f"{{{text}}}"
    return f"{prefix}{text}.{suffix}" if suffix else f"{prefix}{text}"


def summarize_names(names: Iterable[str]) -> str:
    """Return names with those of identical blocks folded: ``embed.weight, layers.{0..23}``."""
    numbers: dict[NamePattern, list[int]] = defaultdict(list)
    for name in names:
        pattern, number = cut_name(name)
        numbers[pattern] += [] if number is None else [number]
    return ", ".join(join_name(pattern.prefix, found, pattern.suffix) for pattern, found in numbers.items())
