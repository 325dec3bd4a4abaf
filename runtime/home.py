"""Home tensors: what a model's registered parameters become. They look and behave like the parameters they were."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from zinf_compile.errors import StoreError
from zinf_compile.runtime.slots import StoredParameter, record_of

_DATA_GET = Tensor.data.__get__  # type: ignore[attr-defined]  # a getset descriptor
_ALIASES = frozenset({_DATA_GET, Tensor.detach, Tensor.numpy, Tensor.untyped_storage, Tensor.data_ptr})


class HomeParameter(Parameter):
    """A parameter whose bytes are at home in a store.

    Whoever looks at it first learns whether its last update finished; whoever gets a writable alias of it makes the
    compute copy stale. In-place operations need no help: they raise the version, which every gather compares.
    """

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run ``func`` on the home tensors as plain tensors; StoreError for a parameter with half an update."""
        for arg in args:
            if isinstance(arg, HomeParameter) and (record := record_of(arg)) is not None:
                if record.torn:
                    raise torn_error(record)
                if func in _ALIASES:
                    record.exposed = True
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


def torn_error(record: StoredParameter) -> StoreError:
    """Return the error for a parameter whose update began and failed."""
    return StoreError(
        f"parameter '{record.name}' was being updated when a read or write failed, and holds neither its old nor its "
        "new value; build the model again and load its last checkpoint"
    )


class EagerGather(torch.autograd.Function):
    """A gather outside of captured graphs, with the parameter itself as the autograd leaf.

    Autograd then sums the gradients of all uses and accumulates into ``p.grad`` exactly as for a plain parameter.
    """

    @staticmethod
    def forward(ctx: Any, parameter: Parameter, gather: Callable[[], Tensor]) -> Tensor:  # type: ignore[override]
        """Return the gathered value."""
        return gather()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        """Return the gradient unchanged."""
        return grad, None
