"""Parameters that another rank has: what of them this rank shows where ranks work in rounds.

They keep their place, name, shape and dtype, on meta, so that ``model.parameters()`` and the groups of an optimizer are the
same on every rank. An optimizer skips them; their own rank updates them. Their gradients are seen here as their norms, for
which all ranks ask at the same time, as ``clip_grad_norm_`` does::

    rank 0    norm of a, its own    norm of b: all ranks tell theirs
    rank 1    norm of a: all ranks tell theirs    norm of b, its own
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from zinf_compile.ir.errors import UnsupportedError
from zinf_compile.runtime.ranks.ranks import Ranks

_VECTOR_NORM = torch.linalg.vector_norm
_SCALES = frozenset({Tensor.mul_, Tensor.div_, Tensor.__imul__, Tensor.__itruediv__, Tensor.zero_, Tensor.detach_})
_GETTERS = frozenset(
    getattr(Tensor, name).__get__
    for name in (
        "shape",
        "dtype",
        "device",
        "layout",
        "ndim",
        "requires_grad",
        "is_leaf",
        "is_sparse",
        "is_cuda",
        "grad_fn",
    )
)
_DESCRIBES = frozenset({Tensor.size, Tensor.dim, Tensor.numel, Tensor.is_floating_point, *_GETTERS})


@dataclass(slots=True, kw_only=True, eq=False)
class Elsewhere:
    """The parameters of a model that other ranks have, and what is known of their gradients."""

    ranks: Ranks
    mine: Mapping[str, Parameter]  # of this rank, by name
    norms: dict[float, dict[str, Tensor]] = field(default_factory=dict)  # of all ranks, by order

    def norm_of(self, name: str, order: float) -> Tensor:
        """Return the norm of a gradient of another rank. All ranks ask at the same time."""
        if order not in self.norms:
            own = {key: _VECTOR_NORM(each.grad, order) for key, each in self.mine.items() if each.grad is not None}
            numbers = {key: (float(norm), norm.dtype) for key, norm in own.items()}
            told = self.ranks.exchange(f"norms of gradients, of order {order}", numbers)
            self.norms[order] = {
                key: torch.tensor(norm, dtype=dtype) for each in told for key, (norm, dtype) in each.items()
            }
        if name not in self.norms[order]:
            raise UnsupportedError(
                f"no rank has a gradient of '{name}'; all ranks have to run backward before they clip"
            )
        return self.norms[order][name].clone()


class RemoteGradient(Tensor):
    """What ``p.grad`` shows of the gradient of a parameter that another rank has: its shape and its norm."""

    place: "RemoteParameter"

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Return a norm, skip what each rank does to its own gradients, and refuse what needs values."""
        self = next((arg for arg in args if isinstance(arg, RemoteGradient)), None)
        if func in _DESCRIBES or self is None:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        place = self.place
        if func is _VECTOR_NORM and len(args) <= 2 and not kwargs:
            return place.elsewhere.norm_of(place.path, float(args[1]) if len(args) == 2 else 2.0)
        if func in _SCALES:
            place.elsewhere.norms.clear()
            return self
        raise UnsupportedError(
            f"the gradient of '{place.path}' is on rank {place.rank}, which computes it with schedule='rounds', and here "
            "only its norm is known; look at it there, or leave schedule out, which shards every gradient (ZeRO stage 3)"
        )

    def __repr__(self) -> str:  # type: ignore[override]  # Tensor takes an argument more
        return f"RemoteGradient(of '{self.place.path}', on rank {self.place.rank})"


class RemoteParameter(Parameter):
    """A parameter that another rank has: on meta, without a value."""

    path: str  # in the model
    rank: int  # that has it
    number: int  # in graphs
    elsewhere: Elsewhere

    @staticmethod
    def in_place_of(parameter: Parameter, name: str, rank: int, number: int, elsewhere: Elsewhere) -> "RemoteParameter":
        """Return what this rank registers in the place of a parameter."""
        empty = torch.empty(parameter.shape, dtype=parameter.dtype, device="meta")
        made: RemoteParameter = Tensor._make_subclass(RemoteParameter, empty, parameter.requires_grad)
        made.path, made.rank, made.number, made.elsewhere = name, rank, number, elsewhere
        return made

    @property
    def grad(self) -> Tensor | None:
        """What is known of its gradient; None if no backward has computed one."""
        gradient: Tensor | None = self.__dict__.get("_gradient")
        return gradient

    @grad.setter
    def grad(self, gradient: Tensor | None) -> None:
        self.__dict__["_gradient"] = gradient

    def note_gradient(self) -> None:
        """Show that its rank has computed a gradient."""
        self.elsewhere.norms.clear()
        if self.requires_grad and self.grad is None:
            shown = torch.zeros((), dtype=self.dtype).expand(self.shape).as_subclass(RemoteGradient)  # takes no memory
            shown.place = self
            self.grad = shown

    def __repr__(self) -> str:  # type: ignore[override]  # Tensor takes an argument more
        return f"RemoteParameter('{self.path}', {tuple(self.shape)}, on rank {self.rank})"
