"""The share of a CPU's budget that the process itself takes: Python, torch, captured graphs. Measured, and rounded up.

A plan needs the number before there is anything to measure. So it is estimated first, measured when a graph has been
captured and compiled, and measured twice more after steps, which leave behind permanent allocations such as cached
kernels.
"""

from typing import Protocol

from zinf_compile.ir.config import Config

_MIB = 2**20
_STEP = 8 * _MIB  # granularity, so that the same model gets the same plan
# What the first capture of a process imports and leaves behind, and what steps add, measured on models of 8 and 12
# blocks.
_EXPECTED = {"aten": 88 * _MIB, "inductor": 144 * _MIB}
_OF_STEPS = 16 * _MIB
_KEPT = 8 * _MIB  # for temporary memory
_LEAST_GAIN = 32 * _MIB  # replan only to gain at least this
_NUM_LOOKS = 2  # measurements after steps


class _Measured(Protocol):
    """The part of a store that is measured."""

    @property
    def num_steps(self) -> int:
        """Return how many steps have begun."""

    def reserve_needed(self) -> int:
        """Return the bytes that the process holds now besides the model."""


class ProcessReserve:
    """The reserve for the process of one store, measured repeatedly."""

    def __init__(self, store: _Measured, *, kept_nbytes: int = 0) -> None:
        """``kept_nbytes`` is what the model already holds on the device outside the store."""
        self._store, self._kept_nbytes = store, kept_nbytes
        self._has_captured = False  # since the last measurement
        self._looks_left = 0
        self._num_steps = 0  # at the last measurement
        self._found = 0  # before the newest capture
        self.least = 0  # what the last measurement found, without what steps are expected to add

    def expect(self, config: Config) -> int:
        """Return the estimated reserve for a graph that Dynamo has traced and that is being captured."""
        if not config.measures_reserve:
            return config.reserve_memory
        self._has_captured = True
        self._found = self._needed()
        return max(config.reserve_memory, _round_up(self._found + _EXPECTED[config.compute]))

    def expect_op_by_op(self, kept_nbytes: int) -> int:
        """Return the estimate for the same graph if it is not compiled; ``kept_nbytes`` were reserved before."""
        return max(kept_nbytes, _round_up(self._found + _EXPECTED["aten"]))

    def expect_least(self, config: Config) -> int:
        """Return the minimum reserve, for when no plan fits with the estimate: what is held already. It may grow later."""
        return _round_up(self._found) if config.measures_reserve else config.reserve_memory

    def look(self, config: Config) -> int:
        """Measure, and return the new reserve: the previous one, unless it is too small or much too large."""
        num_steps = self._store.num_steps
        if not config.measures_reserve or not (
            self._has_captured or (self._looks_left and num_steps > self._num_steps)
        ):
            return config.reserve_memory
        ahead = _OF_STEPS if self._has_captured else 0
        self._looks_left = _NUM_LOOKS if self._has_captured else self._looks_left - 1
        self._has_captured, self._num_steps = False, num_steps
        held = self._needed()
        self.least = _round_up(held + _KEPT)
        needed = _round_up(held + ahead + _KEPT)
        is_enough = needed <= config.reserve_memory < needed + _LEAST_GAIN
        return config.reserve_memory if is_enough else needed

    def _needed(self) -> int:
        return self._store.reserve_needed() + self._kept_nbytes


def _round_up(nbytes: int) -> int:
    return -(-nbytes // _STEP) * _STEP
