"""What planning needs to know of a model's parameters, whether they are in a store or planned without one."""

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from zinf_compile.ir.config import Config
from zinf_compile.ir.facts import ParameterFact
from zinf_compile.ir.plan import Placement


@dataclass(frozen=True, slots=True, kw_only=True)
class Narrowing:
    """Compute copies of a narrower dtype that parameters do not have yet."""

    dtypes: Mapping[int, torch.dtype]  # by parameter number: what gathers of a graph would then move
    parameters: tuple[ParameterFact, ...]
    placements: tuple[Placement, ...]


class Catalog(Protocol):
    """The parameters of a model: their facts, their homes, the copies they may get, and the budgets."""

    @property
    def config(self) -> Config:
        """Return the budgets and options for planning."""

    @property
    def facts(self) -> tuple[ParameterFact, ...]:
        """Return the facts of every parameter, in module order."""

    @property
    def placements(self) -> tuple[Placement, ...]:
        """Return the placement of every parameter by the newest plan, in module order."""

    @property
    def has_plans(self) -> bool:
        """Return whether homes are fixed, because a graph planned earlier has chosen them."""

    @property
    def notes(self) -> Sequence[str]:
        """Return sentences to add to the notes of every plan over these parameters."""

    def narrow_copies(self, reads: Mapping[int, torch.dtype]) -> dict[int, torch.dtype]:
        """Return those of ``reads`` whose parameter has a compute copy of the dtype that the graph casts it to."""

    def plan_narrowing(self, reads: Mapping[int, torch.dtype], streamed: Container[str]) -> Narrowing | None:
        """Return narrower copies for streamed parameters; None if none is useful or possible."""

    def adopt_narrowing(self, narrowing: Narrowing) -> None:
        """Adopt the planned copies."""
