"""How a model's training graphs are tiled, now and in the run that it resumes: the last bits of results depend on it."""

import logging
from collections.abc import Iterable

from zinf_compile.ir.glossary import printable

_log = logging.getLogger(__name__)


class Cuts:
    """The tilings of the graphs of one store, as text; "" is a graph without tiles."""

    def __init__(self) -> None:
        self._here: dict[str, None] = {}
        self._saved: frozenset[str] | None = None  # None: nothing was loaded

    @property
    def ways(self) -> list[str]:
        """Return the tilings of all graphs so far, for a checkpoint."""
        return list(self._here) or sorted(self._saved or ())  # before the first graph, those of the loaded checkpoint

    def add(self, way: str) -> None:
        """Add the tiling of a graph that was just captured; warn if its results will differ from those of the loaded run."""
        if way not in self._here:
            self._here[way] = None
            self._compare(way)

    def resume(self, saved: Iterable[str] | None) -> None:
        """Set the tilings of the run that saved the loaded checkpoint; None for a checkpoint that does not say."""
        self._saved = frozenset(saved or [""])
        for way in self._here:
            self._compare(way)

    def _compare(self, way: str) -> None:
        if self._saved is not None and way not in self._saved:
            _log.warning(
                "the run that saved this checkpoint %s, and this one %s: from here on results agree to rounding, not bit by "
                "bit; for equal bits use the budgets of that run, or %s",
                _describe(max(self._saved)),
                _describe(way),
                "tiles=False, without micro_batches" if "" in self._saved else "its tiles and micro_batches",
            )


def _describe(way: str) -> str:
    return f"computes in tiles ({printable(way)})" if way else "computes everything whole"
