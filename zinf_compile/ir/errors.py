"""The errors a person can meet, by audience. Every message says what, where, the numbers, and what to do."""

from functools import partial
from typing import Any

from zinf_compile.ir.glossary import printable


class ZinfError(Exception):
    """Base of every error raised on purpose by zinf_compile. Each argument is one line of its text, safe to print."""

    def __str__(self) -> str:
        return "\n  ".join(printable(str(line)) for line in self.args)


class ConfigError(ZinfError, ValueError):
    """The user's input cannot be used: an unknown option, an unreadable size, a folder that cannot be written."""


class UnsupportedError(ZinfError, NotImplementedError):
    """The model or the call needs something this version does not do; names what, and the alternative."""


class NotCapturedError(UnsupportedError):
    """A model whose graphs are not captured after all, and that runs eagerly instead; says why. Users never see it."""


class CapacityError(ZinfError, MemoryError):
    """It does not fit; names the largest residents and the smallest budget that works."""


class DeviceCapacityError(CapacityError):
    """One captured graph does not fit the device, however its parameters and activations are placed."""

    def __init__(
        self, message: str, *, needed_nbytes: int, activations_nbytes: int, waiting_helps: bool = False
    ) -> None:
        """``needed_nbytes`` is the smallest budget that works, ``activations_nbytes`` the peak of activations alone.

        ``waiting_helps`` says whether less may be enough if activations leave one at a time, while compute waits.
        """
        super().__init__(message)
        self.needed_nbytes = needed_nbytes
        self.activations_nbytes = activations_nbytes
        self.waiting_helps = waiting_helps

    def __reduce__(self) -> tuple[Any, ...]:
        make = partial(type(self), needed_nbytes=self.needed_nbytes, activations_nbytes=self.activations_nbytes)
        return make, self.args, vars(self)


class StoreError(ZinfError, OSError):
    """Bytes could not be moved: names the parameter, the file, the offset and the system's reason."""


class DamageError(StoreError):
    """Bytes of the store's file are not those that were written: names the parameter, the copy and the offsets."""

    def __init__(self, message: str, *, is_named: bool) -> None:
        """``is_named`` says whether the message names what lies there."""
        super().__init__(message)
        self.is_named = is_named

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(type(self), is_named=self.is_named), self.args, vars(self)


class RankError(StoreError):
    """Ranks that train one model together differ, or one of them is gone; names the ranks and what to do."""

    lacks_memory = False  # whether all that other ranks raised is CapacityError


class PlanFileError(ZinfError, ValueError):
    """A saved plan is damaged, or was written by another version."""


class CheckpointError(ZinfError, ValueError):
    """A checkpoint, or a file of weights, is damaged, or was written by another version; names the file and the tensor."""


class VerifyError(ZinfError, AssertionError):
    """A bug of ours: a plan or a graph breaks a property it must hold. Please report it with the plan."""
