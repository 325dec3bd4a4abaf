"""Parameters that another rank has: what of them this rank shows where ranks work in rounds.

They keep their place, name, shape and dtype, on meta, so that ``model.parameters()`` and the groups of an optimizer are the
same on every rank. An optimizer skips them; their own rank updates them. What reads or writes their values is refused: on
meta it would give no value, and a write would be lost. Their gradients are seen here as their norms, for
which all ranks ask at the same time, as ``clip_grad_norm_`` does::

    rank 0    norm of a, its own    norm of b: all ranks tell theirs
    rank 1    norm of a: all ranks tell theirs    norm of b, its own
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.utils._pytree import tree_leaves

from zinf_compile.ir.errors import UnsupportedError
from zinf_compile.runtime.params.copies import Seat
from zinf_compile.runtime.ranks.ranks import Ranks

_VECTOR_NORM = torch.linalg.vector_norm
_UNSCALE = torch._amp_foreach_non_finite_check_and_unscale_
_ORDERS: Mapping[object, str] = {  # functions that return norms, and how they call the order
    _VECTOR_NORM: "ord",
    torch.linalg.norm: "ord",
    torch.norm: "p",
    Tensor.norm: "p",
    torch._foreach_norm: "ord",
}
_SAME = frozenset({Tensor.detach, Tensor.data.__get__})  # type: ignore[attr-defined]
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
_ATEN = torch.ops.aten
_SHOWS_AGAIN = frozenset({_ATEN.detach, _ATEN.alias})  # of a value, without reading it
_ASKS_FOR_NO_VALUE = frozenset(
    {
        *(_ATEN.empty_like, _ATEN.zeros_like, _ATEN.ones_like, _ATEN.full_like),
        *(_ATEN.rand_like, _ATEN.randn_like, _ATEN.randint_like),
        *(_ATEN.new_empty, _ATEN.new_empty_strided, _ATEN.new_zeros, _ATEN.new_ones, _ATEN.new_full),
        *(_ATEN.is_same_size, _ATEN.is_pinned),
    }
)


@dataclass(slots=True, kw_only=True, eq=False)
class Elsewhere:
    """The parameters of a model that other ranks have, and what is known of their gradients.

    What a rank calls on its own gradients, the others call at the same time on what they see of them. So it tells them the
    norms of its own when either is asked for one.
    """

    ranks: Ranks
    mine: Mapping[str, Parameter]  # of this rank, by name
    norms: dict[float, dict[str, Tensor]] = field(default_factory=dict)  # of all ranks, by order
    is_telling: bool = False
    anchor: Tensor | None = None  # from which captured graphs gather what is trained

    def norm_of(self, name: str, order: float) -> Tensor:
        """Return the norm of a gradient of another rank. All ranks ask at the same time."""
        self._tell(order)
        if name not in self.norms[order]:
            return torch.zeros(())  # what a graph reads and does not train
        return self.norms[order][name].clone()

    def note_call(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Take note of what is called on gradients of this rank."""
        if (order := _find_order(func, args, kwargs)) is not None:
            self._tell(order)
        elif _is_in_place(func):
            self.norms.clear()

    def spread_largest(self, number: Tensor) -> None:
        """Write the largest value on any rank to a tensor of one element. All ranks call this at the same time."""
        number.fill_(max(self.ranks.exchange("infinities in gradients", float(number))))

    def _tell(self, order: float) -> None:
        """Exchange the norms of all gradients, unless they are known."""
        if order in self.norms or self.is_telling:
            return
        self.is_telling = True
        try:
            own = {key: _VECTOR_NORM(each.grad, order) for key, each in self.mine.items() if each.grad is not None}
        finally:
            self.is_telling = False
        numbers = {key: (float(norm), norm.dtype) for key, norm in own.items()}
        told = self.ranks.exchange(f"norms of gradients, of order {order}", numbers)
        self.norms[order] = {
            key: torch.tensor(norm, dtype=dtype) for each in told for key, (norm, dtype) in each.items()
        }


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
        kwargs = kwargs or {}
        first = next((each for each in tree_leaves((args, kwargs)) if isinstance(each, RemoteGradient)), None)
        if func in _DESCRIBES or first is None:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if func in _SAME:
            return first
        elsewhere, is_list = first.place.elsewhere, bool(args) and isinstance(args[0], list | tuple)
        given: Sequence[Tensor] = args[0] if is_list else [first]
        own = [each for each in given if not isinstance(each, RemoteGradient)]
        if (order := _find_order(func, args, kwargs)) is not None:
            norms = [
                elsewhere.norm_of(each.place.path, order)
                if isinstance(each, RemoteGradient)
                else _VECTOR_NORM(each, order)
                for each in given
            ]
            return tuple(norms) if is_list else norms[0]
        if func is _UNSCALE and not own:
            elsewhere.norms.clear()
            elsewhere.spread_largest(args[1])
            return None
        others = [*args[1:], *kwargs.values()]
        if func is _UNSCALE or (_is_in_place(func) and all(map(_is_scalar, others))):
            elsewhere.norms.clear()
            if own:
                func(own, *args[1:], **kwargs)
            return None if is_list else first
        raise UnsupportedError(
            f"the gradient of '{first.place.path}' is on rank {first.place.rank}, which computes it with "
            "schedule='rounds', and here only its norm is known; look at it there, or leave schedule out, which shards "
            "every gradient (ZeRO stage 3)"
        )

    def __repr__(self) -> str:  # type: ignore[override]  # Tensor takes an argument more
        return f"RemoteGradient(of '{self.place.path}', on rank {self.place.rank})"


def _find_order(func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> float | None:
    """Return the order of the norm of whole tensors that a call asks for; None for any other call."""
    name = _ORDERS.get(func)
    others = [value for key, value in kwargs.items() if key != name]
    if name is None or len(args) not in (1, 2) or any(value not in (None, False) for value in others):
        return None
    order = args[1] if len(args) == 2 else kwargs.get(name, 2.0)
    if order is None or order == "fro":
        return 2.0
    return float(order) if isinstance(order, int | float) else None


def _is_scalar(value: object) -> bool:
    return not isinstance(value, list | tuple) and not (isinstance(value, Tensor) and value.dim())


def _is_in_place(func: Callable[..., Any]) -> bool:
    """Return whether a torch function changes its first argument, by torch's naming convention."""
    name = getattr(func, "__name__", "")
    return (name.endswith("_") and not name.endswith("__")) or name in ("__imul__", "__itruediv__")


class RemoteValue(Tensor):
    """The value of a parameter that another rank has, which only that rank can read and write.

    Each op that torch runs on it passes ``__torch_dispatch__``, also one for a list of tensors, in place, or between ranks.
    What it is, such as its shape and its dtype, torch says without an op.
    """

    path: str  # of the parameter, in the model
    rank: int  # that has it
    # Results of what asks for no value are plain tensors.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]  # torch's annotation is partial

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # the supertype's are not optional
        cls,
        func: torch._ops.OpOverload,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run what asks for no value, and refuse everything else."""
        kwargs = kwargs or {}
        if (packet := func.overloadpacket) in _SHOWS_AGAIN:
            return args[0]._show_again()
        if packet in _ASKS_FOR_NO_VALUE:
            with torch._C._DisableTorchDispatch():
                return func(*args, **kwargs)
        remote = next(each for each in tree_leaves((args, kwargs)) if isinstance(each, RemoteValue))
        raise remote._refusal(packet.__name__)

    def _show_again(self) -> "RemoteValue":
        empty = torch.empty(self.shape, dtype=self.dtype, device="meta")
        shown: RemoteValue = Tensor._make_subclass(RemoteValue, empty)
        shown.path, shown.rank = self.path, self.rank
        return shown

    def _refusal(self, what: str) -> UnsupportedError:
        return UnsupportedError(
            f"the value of '{self.path}' is on rank {self.rank}, with schedule='rounds', and {what} would read or write it "
            f"on this rank; do that on rank {self.rank} (on others is_meta of this parameter is True), or save the model "
            "with zinf_compile.save and read what was saved"
        )

    @property
    def data(self) -> Tensor:
        """The value, of which nothing is known here."""
        return self.detach()

    @data.setter
    def data(self, value: Tensor) -> None:
        if value is not self:  # as ``model.float()`` assigns what it does not convert
            raise self._refusal("an assignment to data")

    def to(self, *args: Any, **kwargs: Any) -> Self:
        """Return itself, as ``model.to(device)`` asks: its value stays on its rank. UnsupportedError for another dtype."""
        _, dtype, _, _ = torch._C._nn._parse_to(*args, **kwargs)
        if dtype not in (None, self.dtype):
            raise self._refusal(f"making it {dtype}")
        return self

    def cpu(self, *args: Any, **kwargs: Any) -> Self:
        """Return itself."""
        return self

    def cuda(self, *args: Any, **kwargs: Any) -> Self:
        """Return itself."""
        return self

    def numpy(self, *, force: bool = False) -> Any:
        """Refuse to return an array."""
        raise self._refusal("numpy")

    def tolist(self) -> Any:
        """Refuse to return numbers."""
        raise self._refusal("tolist")

    def set_(self, *args: Any, **kwargs: Any) -> Self:
        """Refuse other memory."""
        raise self._refusal("set_")

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        """Return another tensor that stands for the value."""
        if id(self) not in memo:
            shown = self._show_again()
            memo[id(self)] = Parameter(shown, self.requires_grad) if isinstance(self, Parameter) else shown
        copied: Tensor = memo[id(self)]
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Refuse to be saved."""
        raise self._refusal("saving")

    def __repr__(self) -> str:  # type: ignore[override]  # Tensor takes an argument more
        return f"{type(self).__name__}('{self.path}', {tuple(self.shape)}, on rank {self.rank})"


class RemoteParameter(RemoteValue, Parameter):
    """A parameter that another rank has: on meta, without a value."""

    number: int  # in graphs
    elsewhere: Elsewhere
    # How captured graphs gather it, as if this rank had it:
    seat: Seat
    gathered_dtype: torch.dtype
    gathered_to: torch.device

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

    @property
    def requires_grad(self) -> bool:
        """Whether it is trained."""
        return bool(Tensor.requires_grad.__get__(self))  # type: ignore[attr-defined]

    @requires_grad.setter
    def requires_grad(self, trained: bool) -> None:
        Tensor.requires_grad.__set__(self, trained)  # type: ignore[attr-defined]
        if trained:  # what was frozen is captured again, on its own rank and here
            assert self.elsewhere.anchor is not None
            self.seat.hang_on(self.elsewhere.anchor)

    def requires_grad_(self, requires_grad: bool = True) -> Self:  # as torch's
        """Set whether it is trained."""
        self.requires_grad = requires_grad
        return self

    def note_gradient(self) -> None:
        """Show that its rank has computed a gradient."""
        self.elsewhere.norms.clear()
        if self.requires_grad and self.grad is None:
            shown = torch.zeros((), dtype=self.dtype).expand(self.shape).as_subclass(RemoteGradient)  # takes no memory
            shown.place = self
            self.grad = shown


def refuse_remote(parameters: Iterable[Parameter], what: str) -> None:
    """Raise UnsupportedError if ``what`` needs all parameters of a model, and another rank has one of them."""
    for parameter in parameters:
        if isinstance(parameter, RemoteParameter):
            raise UnsupportedError(
                f"{what} needs whole models, and with schedule='rounds' '{parameter.path}' is on rank {parameter.rank}; "
                "save a checkpoint with zinf_compile.save, load it in one process, and do it there"
            )
