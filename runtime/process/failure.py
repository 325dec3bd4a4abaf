"""Messages after an error in the middle of a step: what was updated, what is torn, and what to do."""

from collections.abc import Sequence

from zinf_compile.ir.errors import StoreError

REMEDY = (
    "load a checkpoint with zinf_compile.load(folder, model, optimizer), which puts it in order (load_state_dict() "
    "does not; models that share budgets need one each), or close it"
)
_MAX_NAMES = 8  # a message must stay readable; the rest is counted


def describe_error(error: BaseException) -> str:
    """Return an error as text; with its class if it is not ours, since its own text may be empty."""
    return str(error) if isinstance(error, StoreError) else f"{type(error).__name__}: {error}"


def describe_state(*, updated: Sequence[str], torn: Sequence[str]) -> str:
    """Return a sentence on which parameters hold their new value and which are torn."""
    if not updated and not torn:
        return "no parameter had changed"
    return f"already updated: {_fold(updated)}; half updated: {_fold(torn)}; the others hold their old values"


def _fold(names: Sequence[str]) -> str:
    shown = ", ".join(f"'{name}'" for name in names[:_MAX_NAMES]) or "none"
    return shown if len(names) <= _MAX_NAMES else f"{shown} and {len(names) - _MAX_NAMES} more"
