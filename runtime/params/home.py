"""Home tensors: what a model's registered parameters become. They look and behave like the parameters they were."""

import sys
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import Parameter

from zinf_compile.ir.errors import StoreError, UnsupportedError
from zinf_compile.ir.slices import Slice
from zinf_compile.runtime.params.full_values import end_writes, write_piece
from zinf_compile.runtime.params.records import StoredParameter, record_of
from zinf_compile.runtime.process.interrupts import without_interrupts
from zinf_compile.runtime.storage.slots import Slot, local_of

DATA_GET = Tensor.data.__get__  # type: ignore[attr-defined]  # a getset descriptor
DATA_SET = Tensor.data.__set__  # type: ignore[attr-defined]
_GRAD_GET = Tensor.grad.__get__  # type: ignore[union-attr]  # a getset descriptor
_SET_REQUIRES_GRAD = (Tensor.requires_grad_, Tensor.requires_grad.__set__)  # type: ignore[attr-defined]
_ALIASES = frozenset({DATA_GET, Tensor.detach, Tensor.numpy, Tensor.untyped_storage, Tensor.data_ptr})

_NEW_PARAMETER = Parameter.__new__.__code__  # it would raise an error of torch's own about what detach() returns
CHANGES_SHAPE = frozenset(
    {
        *(Tensor.resize_, Tensor.resize_as_, Tensor.as_strided_, Tensor.squeeze_, Tensor.unsqueeze_),
        *(Tensor.t_, Tensor.transpose_, Tensor.swapaxes_, Tensor.swapdims_),
    }
)
_GETTERS = """grad requires_grad shape dtype device layout ndim is_leaf is_sparse is_cuda is_quantized is_meta itemsize
nbytes is_mkldnn grad_fn grad_dtype _version _base _backward_hooks"""
# These neither read nor write values, so they need not wait for an update in flight.
_LOOKS_AT_NO_VALUE = frozenset(
    {
        *(getattr(Tensor, name).__get__ for name in _GETTERS.split()),
        Tensor.grad.__set__,  # type: ignore[union-attr]  # a getset descriptor
        Tensor.size,
        Tensor.stride,
        Tensor.storage_offset,
        Tensor.dim,
        Tensor.numel,
        Tensor.nelement,
        Tensor.element_size,
        Tensor.__len__,
        Tensor.is_contiguous,
        Tensor.is_floating_point,
        Tensor.is_complex,
        *_SET_REQUIRES_GRAD,
        Tensor.register_hook,
        Tensor.register_post_accumulate_grad_hook,
    }
)


if TYPE_CHECKING:
    from torch import Tensor as AnyTensor
    from torch.nn import Parameter as AnyParameter
else:  # completed by a tensor class: torch's own, or DTensor where several ranks have a shard each
    AnyTensor = AnyParameter = object


class HomeTensor(AnyTensor):
    """A gradient or a tensor of optimizer state whose bytes are at home in a store, as users see it.

    An optimizer step in the background may be reading or writing it: reading its values blocks until that finishes.
    """

    # Weak: the garbage collector does not see that a parameter refers to its gradient, so a cycle would never be freed.
    record: "weakref.ref[StoredParameter]"

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run ``func`` on the home tensors as plain tensors, once nothing is in flight for them."""
        kwargs = kwargs or {}
        _await_homes(func, args, kwargs)
        with torch._C.DisableTorchFunctionSubclass():
            return cls._run(func, args, kwargs)

    @staticmethod
    def _run(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return func(*args, **kwargs)

    @classmethod
    def show(cls, slot: Slot, record: StoredParameter) -> Tensor:
        """Return the home tensor of a slot for users; always the same object."""
        if slot.shown is None:
            shown = record.views.show(cls, slot.tensor, record, coded=slot.coded)
            assert isinstance(shown, cls)
            shown.record = weakref.ref(record)
            slot.shown = shown
        return slot.shown

    def prepare_look(self) -> None:
        """Called before the values are looked at."""

    def plain(self) -> Tensor:
        """Return it as a plain tensor over the same bytes; of several ranks, as a plain DTensor."""
        await_home(self)
        with torch._C.DisableTorchFunctionSubclass():
            return self._as_plain()

    def _as_plain(self) -> Tensor:
        return self.as_subclass(Tensor)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle as a plain tensor."""
        return self.plain().__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        """Return a plain tensor in memory."""
        if id(self) not in memo:
            memo[id(self)] = self.plain().clone()
        copied: Tensor = memo[id(self)]
        return copied

    def __repr__(self) -> str:  # type: ignore[override]  # Tensor takes an argument more
        return repr(self.plain())


class HomeParameter(AnyParameter):
    """A parameter whose bytes are at home in a store.

    Whoever looks at its values waits for its update in flight, and learns whether its last update finished; whoever gets
    a writable alias of it makes the compute copy stale. In-place operations need no help: they raise the version, which
    every gather compares.
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
        kwargs = kwargs or {}
        _await_homes(func, args, kwargs)
        if func == _GRAD_GET and (early := record_of(args[0])) is not None and early.update.is_early:
            early.store.check_usable()  # else the error would blame the gradient only
            raise refuse_gradient(early, "looked at")
        for arg in args:
            if isinstance(arg, HomeParameter) and (record := record_of(arg)) is not None:
                if func in CHANGES_SHAPE and arg is args[0]:
                    raise _refuse_other_memory(record, func.__name__)
                if func is Tensor.detach and sys._getframe(1).f_code is _NEW_PARAMETER:
                    raise UnsupportedError(
                        f"cannot make another parameter of '{record.name}': it lives in a store since optimize(); make it "
                        "of a copy, as weight.detach().clone() is, or do this before zinf_compile.optimize(model)"
                    )
                if func in _ALIASES:
                    record.copies.expose()
                if (
                    func in _SET_REQUIRES_GRAD
                    and record.gradient.slot is None
                    and False not in (*args[1:], *kwargs.values())
                ):
                    assert record.store.session is not None
                    record.store.session.unfreeze(record)
        with torch._C.DisableTorchFunctionSubclass():
            if func is Tensor.copy_ and _can_stream(args, kwargs):
                return _copy_home(*args)
            result = _set_data(*args) if func == DATA_SET else func(*args, **kwargs)
            if torch.is_grad_enabled():
                note_what_is_computed(result, (*args, *kwargs.values()))
            if args and (record := record_of(args[0])) is not None and looks_at_values(func):
                record.store.keep_writes(record)  # before they take memory for more than one parameter
            return result

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle as the plain parameter it stands for."""
        await_home(self)
        with torch._C.DisableTorchFunctionSubclass():
            return Parameter(self.detach(), self.requires_grad).__reduce_ex__(protocol)

    def set_(self, *args: Any, **kwargs: Any) -> Tensor:
        """Refuse other memory. Torch asks no ``__torch_function__`` about this one."""
        if (record := record_of(self)) is not None:
            raise _refuse_other_memory(record, "set_")
        with torch._C.DisableTorchFunctionSubclass():
            return super().set_(*args, **kwargs)

    def __repr__(self) -> str:  # type: ignore[override]  # as Parameter has it; Tensor takes an argument more
        await_home(self)
        with torch._C.DisableTorchFunctionSubclass():
            return f"Parameter containing:\n{self.detach().requires_grad_(self.requires_grad)}"


class PlainHomeTensor(HomeTensor, Tensor):
    """A home tensor of a process that trains alone."""


class PlainHomeParameter(HomeParameter, Parameter):
    """A parameter at home of a process that trains alone."""


def _refuse_other_memory(record: StoredParameter, what: str) -> UnsupportedError:
    return UnsupportedError(
        f"cannot give '{record.name}' other memory or another shape ({what}): it lives in a store since optimize(); write "
        "into it instead, or do this before zinf_compile.optimize(model)"
    )


def looks_at_values(func: Callable[..., Any]) -> bool:
    """Return whether a torch function reads or writes the values of its arguments."""
    return func not in _LOOKS_AT_NO_VALUE


@without_interrupts
def await_home(tensor: HomeParameter | HomeTensor) -> None:
    """Block until nothing is in flight for a home tensor; StoreError if it holds half an update."""
    record = tensor.record() if isinstance(tensor, HomeTensor) else record_of(tensor)
    if record is None:
        return
    if isinstance(tensor, HomeTensor):
        tensor.prepare_look()
    record.store.finish(record)
    if isinstance(tensor, HomeParameter):
        record.store.join_master(record)
        with torch._C.DisableTorchFunctionSubclass():
            record.store.show_rows(record)
        if (served := record.copies.in_place) is not None and served.weights is not None:
            served.weights.file.check_unchanged()  # a look at pages that a file no longer has would end the process
    if record.store.is_forked:
        with torch._C.DisableTorchFunctionSubclass():
            record.store.take_into_child(record, tensor)
    else:
        with torch._C.DisableTorchFunctionSubclass():
            record.store.let_go(record, tensor)
    if record.gradient.deferred and torch.is_grad_enabled() and isinstance(tensor, HomeParameter):
        record.store.await_gradient(record)  # a backward of what is computed now would add to it unobserved
    if isinstance(tensor, HomeTensor):  # a failure may have kept a gradient, or some state of a step, from being stored
        record.store.check_not_failed()
    if record.update.is_torn and not (record.gradient.slot is not None and tensor is record.gradient.slot.shown):
        raise torn_error(record)


def _await_homes(func: Callable[..., Any], args: Iterable[Any], kwargs: Mapping[str, Any]) -> None:
    """Wait for every home tensor among the arguments of ``func``, in lists as well, unless it looks at no value."""
    if not looks_at_values(func):
        return
    for arg in (*args, *kwargs.values()):
        if isinstance(arg, HomeParameter | HomeTensor):
            await_home(arg)
        elif isinstance(arg, list | tuple):
            _await_homes(func, arg, {})


def note_what_is_computed(result: object, args: Sequence[Any]) -> None:
    """Note a result as a use of the parameters among ``args`` outside of the forward, if autograd recorded one."""
    if isinstance(result, list | tuple):
        for each in result:
            note_what_is_computed(each, args)
    elif isinstance(result, Tensor) and (node := result.grad_fn) is not None:
        for arg in args:
            if isinstance(arg, list | tuple):
                note_what_is_computed(result, arg)
            elif isinstance(arg, HomeParameter) and (record := record_of(arg)) is not None:
                record.gradient.note_use_outside(node)


@without_interrupts
def _set_data(parameter: Tensor, value: Tensor) -> None:
    """``parameter.data = value`` writes into the home tensor: with other memory it would no longer be in the store."""
    record = record_of(parameter)
    assert record is not None
    if value.shape != parameter.shape or value.dtype != parameter.dtype or value.device != parameter.device:
        raise UnsupportedError(
            f"cannot make '{record.name}', {tuple(parameter.shape)} {parameter.dtype} on {parameter.device}, into "
            f"{tuple(value.shape)} {value.dtype} on {value.device}: it lives in a store since optimize(); resize or convert "
            "the model before zinf_compile.optimize(model), and for the dtype of compute say compute_dtype"
        )
    if local_of(value).data_ptr() != local_of(parameter).data_ptr() or value.stride() != parameter.stride():
        parameter.detach().copy_(value)
        record.copies.expose()


def _can_stream(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether ``args[0].copy_(args[1])`` can pass by the mapping, whose touched pages would stay in RAM."""
    if len(args) != 2 or kwargs or (record := record_of(args[0])) is None or not isinstance(args[1], Tensor):
        return False
    parameter, value = args
    return (
        local_of(parameter) is parameter
        and not record.copies.master.in_memory
        and record.store.is_open
        and not (torch.is_grad_enabled() and parameter.requires_grad)  # torch refuses that
        and value.shape == parameter.shape
        and value.is_contiguous()
        and value.device == parameter.device
        and value.dtype.is_complex == parameter.dtype.is_complex
    )


@without_interrupts
def _copy_home(parameter: Tensor, value: Tensor) -> Tensor:
    record = record_of(parameter)
    assert record is not None
    record.store.check_usable(record)
    write_piece(record, 0, value.detach())
    end_writes(record)
    return parameter


def refuse_gradient(record: StoredParameter, what: str) -> UnsupportedError:
    """Return the error for a use of a gradient that ``step_in_backward`` does not support."""
    return UnsupportedError(
        f"the gradient of '{record.name}' cannot be {what}: with step_in_backward a parameter is updated as soon as its "
        "gradient is complete, and that is gone then; clipping, GradScaler and accumulation need step_in_backward=False"
    )


def torn_error(record: StoredParameter) -> StoreError:
    """Return the error for a parameter whose update began and failed."""
    why = "" if record.update.why_torn is None else f" ({record.update.why_torn})"
    return StoreError(
        f"parameter '{record.name}' was being updated when an error came{why}, and holds neither its old nor its new value; "
        "load a checkpoint with zinf_compile.load(folder, model, optimizer)"
    )


class EagerGather(torch.autograd.Function):
    """A gather outside of captured graphs, with the parameter itself as the autograd leaf.

    Autograd then sums the gradients of all uses and accumulates into ``p.grad`` exactly as for a plain parameter.
    """

    @staticmethod
    def forward(ctx: Any, parameter: Parameter, gather: Callable[[], Tensor]) -> Tensor:
        """Return the gathered value."""
        record = record_of(parameter)
        assert record is not None
        record.gradient.add_use(ctx)
        ctx.parameter = parameter
        return gather()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        """Return the gradient where its parameter is, once nothing is in flight for the one it may be added to."""
        grad = grad.to(ctx.parameter.device)
        if (record := record_of(ctx.parameter)) is None:
            return grad, None
        record.store.await_gradient(record)
        return record.views.of_shard(grad), None


class WholeLeaf(torch.autograd.Function):
    """The whole value of a parameter of which this rank has a shard, as the leaf of one eager forward. It has no memory.

    Autograd sums what all gathers of the forward contribute; the sum is reduced over ranks once.
    """

    @staticmethod
    def forward(ctx: Any, parameter: Parameter, record: StoredParameter) -> Tensor:
        """Return a tensor of the parameter's shape, all of whose elements are one."""
        record.gradient.add_use(ctx)
        ctx.record = record
        return torch.empty((), dtype=record.dtype, device=record.store.memory.torch_device).expand(record.shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        """Return this rank's rows of the gradient, summed over ranks."""
        record = ctx.record
        record.store.await_gradient(record)
        shard = record.store.reductions.reduced(Slice.of_whole(record.name, record.shape), grad)
        return record.views.of_shard(shard), None


class GatherOfLeaf(torch.autograd.Function):
    """A gather in an eager forward on several ranks."""

    @staticmethod
    def forward(ctx: Any, leaf: Tensor, gather: Callable[[], Tensor]) -> Tensor:
        """Return the gathered value."""
        return gather()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        """Return the gradient for the leaf."""
        return grad, None


class TransformedGather(torch.autograd.Function):
    """An eager gather inside of a transform of ``torch.func``, which wants the context set up apart from the forward."""

    @staticmethod
    def forward(parameter: Parameter, gather: Callable[[], Tensor]) -> Tensor:
        """Return the gathered value."""
        return gather()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        """Note whose value it is."""
        ctx.parameter, _ = inputs

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        """Return the gradient where its parameter is, as outside of a transform."""
        if (record := record_of(ctx.parameter)) is not None:
            record.store.await_gradient(record)
        return grad.to(ctx.parameter.device), None

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> None:
        """Return no tangent: transforms that differentiate by parameters replace the parameters."""

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[None, None], parameter: Parameter, gather: Callable[[], Tensor]
    ) -> tuple[Any, None]:
        """Return the value itself: it is the same for the whole batch."""
        apply: Callable[..., Tensor] = TransformedGather.apply
        return apply(parameter, gather), None
