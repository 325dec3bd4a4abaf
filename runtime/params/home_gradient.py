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

``GradScaler.unscale_`` is deferred as clipping is: a gradient has an infinite or undefined element exactly if its largest
absolute value, a norm, is so. Clipping then asks for norms of the products, which are rounded. These are taken on the
device of a copy that is multiplied by the factor of the last step, and hold if the next factor is the same::

    backward          sink          norms = {inf: ...}; unscaled_norms = {(1/1024, 2.0): ...}
    unscale_                        found_inf = norms[inf] is not finite; deferred += [times 1/1024]
    clip_grad_norm_   vector_norm   -> unscaled_norms[1/1024, 2.0]
"""

import logging
import math
from collections import defaultdict
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
from zinf_compile.runtime.params.remote import Elsewhere, RemoteGradient
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
        if RemoteGradient in types:
            return NotImplemented  # it calls this for those at home
        if looks_at_values(func):
            homes = list(_homes_in((*args, *kwargs.values())))
            if (elsewhere := _elsewhere_of(homes)) is not None:
                elsewhere.note_call(func, args, kwargs)
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
            if func is not _UNSCALE or kwargs:
                return cls._run_on_values(func, types, args, kwargs)
            if homes and (record := homes[0].record()) is not None:
                record.store.await_compute()  # the scale comes from the device, by an asynchronous copy
            records = [_unscaled_record(gradient) for gradient in args[0]]
            rest = [gradient for gradient, record in zip(args[0], records, strict=True) if record is None]
            if rest:
                cls._run_on_values(func, types, (rest, *args[1:]), kwargs)
            _unscale([record for record in records if record is not None], *args[1:])
            return _spread_infinities(homes, args[1])
        return super().__torch_function__(func, types, args, kwargs)

    @classmethod
    def _run_on_values(
        cls, func: Callable[..., Any], types: Sequence[type], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run ``func`` once deferred operations are applied, and note what it changes or hands out."""
        homes = list(_homes_in((*args, *kwargs.values())))
        for home in homes:
            if (record := _streamed_record(home)) is not None or (record := _deferred_record(home)) is not None:
                settle_gradient(record)
        result = super().__torch_function__(func, types, args, kwargs)
        for home in homes:
            home.note_what_is_handed_out(func, result)
        return result

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


def note_norms(record: StoredParameter, value: Tensor, *, leaves_device: bool = False) -> None:
    """Compute the norms that were asked for so far, from a whole gradient in memory: contiguous, as it is stored.

    Those of an unscaled gradient only if it ``leaves_device``, where plans count memory for a copy.
    """
    assert record.gradient.slot is not None
    if record.gradient.slot.is_aliased:  # it may change unseen
        return
    link, scratch = record.store.tensor_io.link, None
    if leaves_device and record.store.wanted_norms.unscaled and value.nbytes <= link.leaving_limit:
        link.make_room(value.nbytes)
        scratch = torch.empty_like(value)
    _note_norms(record, value, scratch)


def _note_norms(record: StoredParameter, value: Tensor, scratch: Tensor | None) -> None:
    """Compute norms of a gradient; in ``scratch``, if there is some, those of the unscaled one."""
    if not value.numel():
        return
    gradient, wanted = record.gradient, record.store.wanted_norms
    for order in wanted.as_they_are:
        gradient.note_norm(order, _VECTOR_NORM(value, order))
    if scratch is None or wanted.inverse_scale is None:
        return
    _unscale_part(scratch.copy_(value), wanted.inverse_scale)
    for order in wanted.unscaled:
        gradient.note_unscaled_norm(wanted.inverse_scale, order, _VECTOR_NORM(scratch, order))


def add_to_gradient(record: StoredParameter, value: Tensor) -> None:
    """Start adding what this rank has of a gradient, on the device, to the gradient at home."""
    slot = record.gradient.slot
    assert slot is not None
    record.store.await_gradient(record)
    wanted = record.store.wanted_norms
    # Asked now: what is being added is an alias, too.
    is_known = wanted.are_any and not slot.is_aliased
    on_sum = partial(_note_norms, record) if is_known else None
    with_scratch = is_known and bool(wanted.unscaled)
    record.store.tensor_io.add_value(slot, value, Tier.DEVICE, on_sum=on_sum, with_scratch=with_scratch)


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
    if record is None or len(args) > 2 or kwargs or not isinstance(order, int | float):
        return None
    gradient, slot, wanted = record.gradient, record.gradient.slot, record.store.wanted_norms
    assert slot is not None
    is_unscaled = [operation.call for operation in gradient.deferred] == [_unscale_part]
    if slot.is_aliased or (gradient.deferred and not is_unscaled):  # an alias may change it unseen
        return None
    order = float(order)
    (wanted.unscaled if is_unscaled else wanted.as_they_are).add(order)
    if order not in gradient.norms:
        if slot.in_memory:
            return None
        value = record.store.memory.new_value(slot.tensor.shape, slot.tensor.dtype)
        record.store.check_usable(record)
        with record.store.failing_on_error():
            record.store.tensor_io.read_value(slot, value)
        with torch.no_grad():
            for operation in gradient.deferred:  # to this copy; for the one at home they stay deferred
                operation(value)
        gradient.note_norm(order, _VECTOR_NORM(value, order))
    norm = gradient.norms[order].to(slot.tensor.device, copy=True)  # the device of the gradient that users see
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


def _unscaled_record(tensor: object) -> StoredParameter | None:
    """Return whose gradient a tensor is, if it is unscaled by ``_unscale``; None if torch is to do that in memory.

    Torch does where an alias would not show what is deferred, and where no norms are taken, as of tiles and in eager mode,
    so that the host has to read the gradient anyway.
    """
    if (record := _streamed_record(tensor)) is not None:
        return record
    if (record := _record_beside_device(tensor)) is None:
        return None
    assert record.gradient.slot is not None
    is_first = math.inf not in record.store.wanted_norms.as_they_are
    can_defer = not record.gradient.slot.is_aliased and (is_first or _known_largest(record) is not None)
    return record if can_defer else None


@without_interrupts
def _unscale(records: Sequence[StoredParameter], found_inf: Tensor, inverse_scale: Tensor) -> None:
    """Unscale gradients at home as ``GradScaler.unscale_`` does, when they are next read, and note infinities now.

    One on nvme with an alias is unscaled now, a staging buffer at a time. Raises what torch raises for arguments that it
    does not accept.
    """
    for record in records:
        _UNSCALE([torch.empty(0, dtype=record.dtype)], found_inf, inverse_scale)
    largest: defaultdict[torch.device, list[Tensor]] = defaultdict(list)
    factor = inverse_scale.item()
    for record in records:
        record.store.wanted_norms.as_they_are.add(math.inf)
        record.store.wanted_norms.inverse_scale = factor
        norm = _find_largest(record)
        largest[norm.device].append(norm)
    if not all(bool(torch.stack(norms).isfinite().all()) for norms in largest.values()):  # one wait for each device
        found_inf.fill_(1.0)
    for record in records:
        assert record.gradient.slot is not None
        record.gradient.defer_unscaling(DeferredOp(call=_unscale_part, args=(factor,), kwargs={}), factor)
        if record.gradient.slot.is_aliased:
            settle_gradient(record)
    if records and not records[0].store.ranks.is_alone:  # each rank has seen its own rows only
        found_inf.fill_(records[0].store.ranks.largest("infinities in gradients", int(found_inf.item()))[0])


def _unscale_part(gradient: Tensor, inverse_scale: float) -> Tensor:
    """Unscale a gradient, or a part of one, in place, wherever it is. Whether it has infinities was asked before."""
    found_inf = gradient.new_empty((), dtype=torch.float32)  # only written
    _UNSCALE([gradient], found_inf, gradient.new_full((), inverse_scale, dtype=torch.float32))
    return gradient


def _known_largest(record: StoredParameter) -> Tensor | None:
    """Return the largest absolute value of a gradient as it is at home; None if it is not known."""
    slot = record.gradient.slot
    assert slot is not None
    is_known = not slot.is_aliased and (record.gradient.is_as_noted or not slot.in_memory)
    return record.gradient.norms.get(math.inf) if is_known else None


def _find_largest(record: StoredParameter) -> Tensor:
    """Return the largest absolute value of a gradient: finite exactly if all are. Reads it if nothing is known of it."""
    if (known := _known_largest(record)) is not None:
        return known
    slot = record.gradient.slot
    assert slot is not None
    settle_gradient(record)
    record.store.check_usable(record)
    norms = [torch.zeros((), dtype=slot.tensor.dtype)]
    with torch.no_grad(), record.store.failing_on_error():
        norms += [_VECTOR_NORM(piece, math.inf) for _, piece in record.store.tensor_io.read_pieces(slot)]
    return torch.stack(norms).amax()


def _spread_infinities(gradients: Sequence[HomeGradient], found_inf: Tensor) -> None:
    """Let all ranks know of infinities in gradients of DTensors of the user's: torch asks only where one is divided."""
    records = (gradient.record() for gradient in gradients)
    distributed = [record for record in records if record is not None and record.views.distribution is not None]
    if distributed:
        distributed[0].views.spread_largest(found_inf)
    if (elsewhere := _elsewhere_of(gradients)) is not None:
        elsewhere.spread_largest(found_inf)


def _elsewhere_of(gradients: Sequence[HomeGradient]) -> Elsewhere | None:
    """Return what is known of other ranks' gradients where ranks work in rounds."""
    found = (record.store.elsewhere for gradient in gradients if (record := gradient.record()) is not None)
    return next(found, None)


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
    """Return whose gradient in host memory a tensor is, if it is as it left a device, or only unscaled since."""
    record = _record_beside_device(tensor)
    return record if record is not None and record.gradient.is_as_noted else None


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
