"""Home gradients: what ``p.grad`` shows of a gradient on nvme, without touching the disk for what clipping does to it.

``clip_grad_norm_`` asks every gradient for its norm and then scales it. The norm is computed while the whole gradient is
in memory on its way home, and element-wise in-place operations are deferred until the optimizer step reads the gradient,
chunk by chunk::

    backward          sink          norms = {2.0: ...}
    clip_grad_norm_   vector_norm   -> norms[2.0]
                      mul_(0.7)     -> deferred += [mul_(0.7)]
    step              chunk = read; mul_(0.7) on the chunk; update

Any other access applies the deferred operations first, so that results are the same.

Operations on a gradient in host memory beside a device are deferred as well: the update applies them to a copy of each
chunk. Its norms are taken on the device, before it leaves: from host memory it would take as long as to copy all gradients
there. They hold until somebody changes it.
"""

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from zinf_compile.ir.glossary import Tier, printable
from zinf_compile.ir.slices import Slice
from zinf_compile.runtime.params.gradient_state import DeferredOp
from zinf_compile.runtime.params.home import HomeTensor, looks_at_values, refuse_gradient
from zinf_compile.runtime.params.records import RecordStore, StoredParameter
from zinf_compile.runtime.process.interrupts import without_interrupts
from zinf_compile.runtime.storage.slots import Slot, local_of

_log = logging.getLogger(__name__)
_DENORMAL = 1e-40  # of float32
_VECTOR_NORM = torch.linalg.vector_norm
_UNSCALE = torch._amp_foreach_non_finite_check_and_unscale_
_ELEMENT_WISE: Mapping[Callable[..., Any], Callable[..., Any]] = {
    **{func: func for func in (Tensor.mul_, Tensor.div_, Tensor.clamp_, Tensor.clamp_min_, Tensor.clamp_max_)},
    Tensor.__imul__: Tensor.mul_,
    Tensor.__itruediv__: Tensor.div_,
    torch._foreach_mul_: Tensor.mul_,
    torch._foreach_div_: Tensor.div_,
    torch._foreach_clamp_min_: Tensor.clamp_min_,
    torch._foreach_clamp_max_: Tensor.clamp_max_,
}
_UNCOUNTED = ("_amp_", "_fused_")  # autograd does not count what these write
_MULTIPLY = frozenset({Tensor.mul_, Tensor.__imul__, torch._foreach_mul_})


class HomeGradient(HomeTensor):
    """A gradient at home, as users see it."""

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run ``func``: answer from what is known of the gradient, defer it, or run it on the value."""
        kwargs = kwargs or {}
        if looks_at_values(func):
            homes = list(_homes_in((*args, *kwargs.values())))
            for home in homes:
                if (record := home.record()) is not None and record.store.early_step is not None:
                    raise refuse_gradient(record, "looked at")
                home.prepare_look()
            if func in _MULTIPLY and _is_by_one(args, kwargs):  # clipping to a norm that the gradients do not reach
                return args[0] if isinstance(args[0], Tensor) else None
            if func is _VECTOR_NORM and (norm := _find_norm(args, kwargs)) is not None:
                return norm
            if func in _ELEMENT_WISE and _defer(func, args, kwargs):
                return args[0] if isinstance(args[0], Tensor) else None
            if func is _UNSCALE and homes and (record := homes[0].record()) is not None:
                record.store.await_compute()  # the scale comes from the device, by an asynchronous copy
            if func is _UNSCALE and all(map(_streamed_record, args[0])):
                _unscale(*args)
                return _spread_infinities(homes, args[1])
            for home in homes:
                if (record := _streamed_record(home)) is not None or (record := _deferred_record(home)) is not None:
                    settle_gradient(record)
            result = super().__torch_function__(func, types, args, kwargs)
            for home in homes:
                home.note_what_is_handed_out(func, result)
            if func is _UNSCALE:
                _spread_infinities(homes, args[1])
            return result
        return super().__torch_function__(func, types, args, kwargs)

    def prepare_look(self) -> None:
        """Reduce what has not been reduced over ranks yet: of all gradients, since every rank looks at the same time.

        In a hook, the gradient may be on its way home yet.
        """
        if (record := self.record()) is not None:
            reduce_unreduced(record.store)
            record.store.finish_gradients(record)

    def plain(self) -> Tensor:
        """See HomeTensor.plain."""
        if (record := self.record()) is not None:
            settle_gradient(record)
        return super().plain()

    def note_what_is_handed_out(self, func: Callable[..., Any], result: object) -> None:
        """Note an edit if ``func`` or whoever has its result may change the value without autograd counting it.

        A view or an array may be changed unseen, and be gone by the time somebody asks.
        """
        if (record := self.record()) is None or record.gradient.slot is None:
            return
        if getattr(func, "__name__", "").startswith(_UNCOUNTED) or _hands_out(result, self):
            record.gradient.note_edit()


class PlainHomeGradient(HomeGradient, Tensor):
    """A gradient at home of a process that trains alone."""


@without_interrupts
def show_gradient(record: StoredParameter) -> Tensor:
    """Return the gradient of a parameter as ``p.grad`` is to show it; always the same object for one slot."""
    assert record.gradient.slot is not None
    return HomeGradient.show(record.gradient.slot, record)


@without_interrupts
def begin_gradient(record: StoredParameter) -> Slot:
    """Return the slot for a new gradient: another one if users still hold a tensor over the last gradient."""
    assert record.gradient.slot is not None
    if record.gradient.unreduced is not None:  # whether users still hold the last gradient may differ between ranks
        reduce_unreduced(record.store)
    slot = was = record.gradient.slot
    if not was.is_forgotten:
        settle_gradient(record)
        forgotten = record.gradient.find_forgotten()
        slot = forgotten or record.store.new_slot(record.name, record.shape, was.tensor.dtype, was.tier, was.key)
    record.gradient.begin(slot)
    return slot


def note_norms(record: StoredParameter, value: Tensor) -> None:
    """Compute the norms that were asked for so far, from a whole gradient in memory: contiguous, as it is stored."""
    assert record.gradient.slot is not None
    if not record.gradient.slot.is_aliased:  # else it may change unseen
        _note_norms(record, value)


def _note_norms(record: StoredParameter, value: Tensor) -> None:
    for order in record.store.wanted_norms:
        record.gradient.note_norm(order, _VECTOR_NORM(value, order))


def add_to_gradient(record: StoredParameter, value: Tensor) -> None:
    """Start adding what this rank has of a gradient, on the device, to the gradient at home."""
    slot = record.gradient.slot
    assert slot is not None
    record.store.await_gradient(record)
    # Asked now: what is being added is an alias, too.
    is_known = record.store.wanted_norms and not slot.is_aliased
    on_sum = partial(_note_norms, record) if is_known else None
    record.store.tensor_io.add_value(slot, value, Tier.DEVICE, on_sum=on_sum)


@without_interrupts
def settle_gradient(record: StoredParameter) -> None:
    """Apply deferred operations, since the value will be read; after that nothing is known of it."""
    if record.gradient.unreduced is not None:
        reduce_unreduced(record.store)
    if operations := record.gradient.take_deferred():
        with torch.no_grad():
            _rewrite(record, lambda piece: [operation(piece) for operation in operations])


@without_interrupts
def add_unreduced(record: StoredParameter, grad: Tensor) -> None:
    """Keep a whole gradient of this rank on the device, to be reduced once for all batches of a step (ZeRO stage 1)."""
    store = record.store
    if record.parameter.grad is None:
        begin_gradient(record)
        record.gradient.begin_unreduced()
        record.parameter.grad = show_gradient(record)
    record.gradient.add_unreduced(grad, store.memory.new_value)
    store.unreduced[record.name] = record


@without_interrupts
def reduce_unreduced(store: RecordStore) -> None:
    """Reduce the gradients that were kept for that, and send this rank's rows home; blocks. All ranks call it at once."""
    if not store.unreduced:
        return
    records = [*store.unreduced.values()]
    store.unreduced.clear()
    store.ranks.meet("the reduction of a step's gradients")
    with torch.no_grad(), store.failing_on_error():
        for record in records:
            grad, adds = record.gradient.take_unreduced()
            whole = Slice.of_whole(record.name, record.shape)
            store.reductions.start(whole, grad, partial(_take_rows_home, record, adds))
            store.meter.add_collective("reduction", grad.nbytes)
        store.reductions.finish()
        store.tensor_io.wait_writes()


def drop_unreduced(store: RecordStore) -> None:
    """Drop the gradients that were not reduced, with a warning: a store that closes asks no other ranks."""
    names = [*store.unreduced]
    for record in store.unreduced.values():
        record.gradient.take_unreduced()
        record.parameter.grad = None
    store.unreduced.clear()
    if names:
        _log.warning(
            "%d gradients, such as that of '%s', had not been reduced over ranks when the model was closed, and are gone; "
            "step or look at them before zinf_compile.close(model)",
            len(names),
            printable(names[0]),
        )


def _take_rows_home(record: StoredParameter, adds: bool, shard: Tensor) -> None:
    store, slot = record.store, record.gradient.slot
    assert slot is not None
    rows = shard.view(slot.tensor.shape)
    if adds:
        add_to_gradient(record, rows)
        return
    if not slot.in_memory:
        note_norms(record, rows)
    store.tensor_io.write_value(slot, rows, Tier.DEVICE)


@without_interrupts
def _find_norm(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor | None:
    """Return the norm of a gradient on nvme, or one that was taken on the device; None if something else is asked for."""
    order = args[1] if len(args) == 2 else 2.0
    record = _streamed_record(args[0]) or _departed_record(args[0])
    if record is None or len(args) > 2 or kwargs or not isinstance(order, int | float) or record.gradient.deferred:
        return None
    assert record.gradient.slot is not None
    slot = record.gradient.slot
    if slot.is_aliased:  # it may change unseen
        return None
    order = float(order)
    record.store.wanted_norms.add(order)
    if order not in record.gradient.norms:
        if slot.in_memory:
            return None
        value = record.store.memory.new_value(slot.tensor.shape, slot.tensor.dtype)
        record.store.check_usable(record)
        with record.store.failing_on_error():
            record.store.tensor_io.read_value(slot, value)
        record.gradient.note_norm(order, _VECTOR_NORM(value, order))
    norm = record.gradient.norms[order].to(slot.tensor.device, copy=True)  # the device of the gradient that users see
    return record.views.of_norm(norm, order)


@without_interrupts
def _defer(func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Defer an operation; return whether that was possible for every gradient it changes.

    Raises what the operation raises for arguments that it does not accept.
    """
    targets = args[0] if isinstance(args[0], list | tuple) else [args[0]]
    records = [_streamed_record(target) or _record_beside_device(target) for target in targets]
    if not all(map(_is_number, (*args[1:], *kwargs.values()))) or not all(records):
        return False
    for record in records:
        assert record is not None
        assert record.gradient.slot is not None
        if record.gradient.slot.is_aliased:  # the alias would not show it
            return False
        _ELEMENT_WISE[func](torch.empty(0, dtype=record.dtype), *args[1:], **kwargs)
    rest = [arg.clone() if isinstance(arg, Tensor) else arg for arg in args[1:]]
    named = {key: value.clone() if isinstance(value, Tensor) else value for key, value in kwargs.items()}
    for record in records:
        assert record is not None
        record.gradient.defer(DeferredOp(call=_ELEMENT_WISE[func], args=tuple(rest), kwargs=named))
    return True


@without_interrupts
def _unscale(gradients: Sequence[Tensor], found_inf: Tensor, inverse_scale: Tensor) -> None:
    """Unscale gradients as ``GradScaler.unscale_`` does, a staging buffer at a time."""
    for gradient in gradients:
        record = _streamed_record(gradient)
        assert record is not None
        settle_gradient(record)
        record.gradient.note_edit()
        _rewrite(record, lambda piece: _UNSCALE([piece], found_inf, inverse_scale))
    record = _streamed_record(gradients[0]) if gradients else None
    if record is not None and not record.store.ranks.is_alone:  # each rank has seen its own rows only
        found_inf.fill_(record.store.ranks.largest("infinities in gradients", int(found_inf.item()))[0])


def _spread_infinities(gradients: Sequence[HomeGradient], found_inf: Tensor) -> None:
    """Let all ranks know of infinities in gradients of DTensors of the user's: torch asks only where one is divided."""
    records = (gradient.record() for gradient in gradients)
    distributed = [record for record in records if record is not None and record.views.distribution is not None]
    if distributed:
        distributed[0].views.spread_largest(found_inf)


def _rewrite(record: StoredParameter, change: Callable[[Tensor], object]) -> None:
    """Change the gradient at home in place; on nvme read and write it a staging buffer at a time."""
    store, slot = record.store, record.gradient.slot
    assert slot is not None
    store.check_usable(record)
    if slot.in_memory:
        change(slot.tensor.detach().view(-1))
        return
    with store.failing_on_error():
        store.tensor_io.rewrite_value(slot, lambda piece, _: change(piece))
        store.tensor_io.wait_writes()


def _streamed_record(tensor: object) -> StoredParameter | None:
    """Return whose gradient on nvme a tensor is, if it is the one ``p.grad`` shows now."""
    record = tensor.record() if isinstance(tensor, HomeGradient) else None
    if record is None or record.gradient.slot is None or record.gradient.slot.in_memory:
        return None
    return record if record.gradient.slot.shown is tensor else None


def _record_beside_device(tensor: object) -> StoredParameter | None:
    """Return whose gradient in host memory beside a device a tensor is, if it is the one ``p.grad`` shows now."""
    record = tensor.record() if isinstance(tensor, HomeGradient) else None
    if record is None or not record.store.memory.is_behind_link(Tier.DEVICE) or not record.store.ranks.is_alone:
        return None
    slot = record.gradient.slot
    return record if slot is not None and slot.in_memory and slot.shown is tensor else None


def _departed_record(tensor: object) -> StoredParameter | None:
    """Return whose gradient in host memory a tensor is, if it has come there from a device and is as it left."""
    record = _record_beside_device(tensor)
    return record if record is not None and record.gradient.is_untouched else None


def _deferred_record(tensor: object) -> StoredParameter | None:
    """Return whose gradient in host memory a tensor is, if operations on it are deferred."""
    record = _record_beside_device(tensor)
    return record if record is not None and record.gradient.deferred else None


def _homes_in(args: Iterable[Any]) -> Iterator[HomeGradient]:
    for arg in args:
        if isinstance(arg, list | tuple):
            yield from _homes_in(arg)
        elif isinstance(arg, HomeGradient):
            yield arg


def _hands_out(result: object, home: Tensor) -> bool:
    """Return whether a result may lead to the bytes of a home tensor: another tensor over them, an array, an address."""
    if isinstance(result, list | tuple):
        return any(_hands_out(each, home) for each in result)
    if isinstance(result, Tensor):
        if result is home:
            return False
        with torch._C.DisableTorchFunctionSubclass():
            try:
                return bool(local_of(result).untyped_storage()._cdata == local_of(home).untyped_storage()._cdata)
            except NotImplementedError:  # of sparse tensors and those of torch.func, which have none
                return result.layout is torch.strided
    return not isinstance(result, bool | float | str | None)


def _is_by_one(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Return whether gradients are multiplied by exactly one, which changes no bit unless denormals are flushed."""
    if len(args) != 2 or kwargs or not _is_number(args[1]):
        return False
    factor = args[1]
    if isinstance(factor, Tensor) and factor.device.type != "cpu":  # a look at it would wait for the device
        return False
    targets = args[0] if isinstance(args[0], list | tuple) else [args[0]]
    if not all(isinstance(target, HomeGradient) and not target.requires_grad for target in targets):
        return False
    return bool(factor == 1) and bool(torch.tensor(_DENORMAL) * 1.0 > 0)


def _is_number(value: object) -> bool:
    """Return whether an argument is one number, the same for every part of the gradient."""
    if isinstance(value, Tensor):
        return type(value) is Tensor and value.dim() == 0 and not value.requires_grad
    return value is None or isinstance(value, int | float)
