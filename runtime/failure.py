"""What a model says after an error in the middle of a step: what was updated, what is torn, and what to do."""

from collections.abc import Sequence

from zinf_compile.errors import StoreError

REMEDY = (
    "load a checkpoint with zinf_compile.load(folder, model, optimizer), which puts it in order (load_state_dict() "
    "does not; models that share budgets need one each), or close it"
)
_MAX_NAMES = 8  # a message is for reading; the rest is counted


def describe_error(error: BaseException) -> str:
    """Return an error in words; one that is not ours with its class, since its text may be nothing."""
    return str(error) if isinstance(error, StoreError) else f"{type(error).__name__}: {error}"


def describe_state(*, updated: Sequence[str], torn: Sequence[str]) -> str:
    """Return which parameters hold their new value and which hold neither the old nor the new one."""
    if not updated and not torn:
        return "no parameter had changed"
    return f"already updated: {_fold(updated)}; half updated: {_fold(torn)}; the others hold their old values"


def _fold(names: Sequence[str]) -> str:
    shown = ", ".join(f"'{name}'" for name in names[:_MAX_NAMES]) or "none"
    return shown if len(names) <= _MAX_NAMES else f"{shown} and {len(names) - _MAX_NAMES} more"
