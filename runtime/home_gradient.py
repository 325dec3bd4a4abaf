"""Home gradients: what ``p.grad`` shows of a gradient on nvme, without touching the disk for what clipping does to it.

``clip_grad_norm_`` asks every gradient for its norm and then scales it. The norm is computed while the whole gradient is
in memory on its way home, and in-place operations that are element by element are put off until the optimizer step reads
the gradient, chunk by chunk::

    backward          sink          norms = {2.0: ...}
    clip_grad_norm_   vector_norm   -> norms[2.0]
                      mul_(0.7)     -> deferred += [mul_(0.7)]
    step              chunk = read; mul_(0.7) on the chunk; update

Any other look applies what is put off first, so that nobody can tell.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from zinf_compile.runtime.home import HomeTensor, looks_at_values, refuse_gradient
from zinf_compile.runtime.slots import DeferredOp, Slot, StoredParameter

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


class HomeGradient(HomeTensor):
    """A gradient at home, as people see it."""

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run ``func``: from what is known of the gradient, put off, or on its value."""
        kwargs = kwargs or {}
        if looks_at_values(func):
            homes = list(_homes_in((*args, *kwargs.values())))
            for home in homes:
                if (record := home.record()) is not None and record.store.early_step is not None:
                    raise refuse_gradient(record, "looked at")
            if func is _VECTOR_NORM and (norm := _find_norm(args, kwargs)) is not None:
                return norm
            if func in _ELEMENT_WISE and _defer(func, args, kwargs):
                return args[0] if isinstance(args[0], Tensor) else None
            if func is _UNSCALE and homes and (record := homes[0].record()) is not None:
                record.store.await_compute()  # the scale comes from the device, by a copy that nobody waits for
            if func is _UNSCALE and all(map(_streamed_record, args[0])):
                return _unscale(*args)
            for home in homes:
                if (record := _streamed_record(home)) is not None:
                    settle_gradient(record)
        return super().__torch_function__(func, types, args, kwargs)

    def plain(self) -> Tensor:
        """Return it as a plain tensor over the same bytes."""
        if (record := self.record()) is not None:
            settle_gradient(record)
        return super().plain()


def show_gradient(record: StoredParameter) -> Tensor:
    """Return the gradient of a parameter as ``p.grad`` is to show it; always the same object for one slot."""
    assert record.gradient is not None
    return HomeGradient.show(record.gradient, record)


def begin_gradient(record: StoredParameter) -> Slot:
    """Return the slot for a new gradient: not the one somebody still holds, who is to keep what is there."""
    assert record.gradient is not None
    if not record.gradient.is_forgotten:
        settle_gradient(record)
        slots = [*record.held_gradients, record.gradient]
        fresh = next((slot for slot in slots if slot.is_forgotten), None)
        if fresh is None:
            was = record.gradient
            fresh = record.store.new_slot(was.name, was.tensor.shape, was.tensor.dtype, was.tier)
        record.held_gradients = [slot for slot in slots if slot is not fresh]
        record.gradient = fresh
    record.deferred.clear()
    record.norms.clear()
    return record.gradient


def note_norms(record: StoredParameter, value: Tensor) -> None:
    """Compute the norms that were asked for so far, from a whole gradient in memory: contiguous, as it is stored."""
    assert record.gradient is not None
    if record.gradient.is_aliased:  # it may change unseen
        return
    for order in record.store.wanted_norms:
        record.norms[order] = _VECTOR_NORM(value, order)


def settle_gradient(record: StoredParameter) -> None:
    """Apply what was put off, since somebody will look; after that nothing is known of the value."""
    record.norms.clear()
    if record.deferred:
        operations = record.deferred.copy()
        record.deferred.clear()
        with torch.no_grad():
            _rewrite(record, lambda piece: [operation(piece) for operation in operations])


def _find_norm(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor | None:
    """Return the norm of a gradient on nvme; None if something else is asked for."""
    order = args[1] if len(args) == 2 else 2.0
    record = _streamed_record(args[0])
    if record is None or len(args) > 2 or kwargs or not isinstance(order, int | float) or record.deferred:
        return None
    assert record.gradient is not None
    slot = record.gradient
    if slot.is_aliased:  # it may change unseen
        return None
    order = float(order)
    record.store.wanted_norms.add(order)
    if order not in record.norms:
        value = record.store.memory.new_value(slot.tensor.shape, slot.tensor.dtype)
        record.store.check_usable(record)
        with record.store.failing_on_error():
            record.store.transfers.read_value(slot, value)
        record.norms[order] = _VECTOR_NORM(value, order)
    return record.norms[order].to(slot.tensor.device, copy=True)  # where the gradient is that people see


def _defer(func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Put an operation off; return whether that was possible for every gradient it changes.

    Raises what the operation raises for arguments it does not take.
    """
    targets = args[0] if isinstance(args[0], list | tuple) else [args[0]]
    records = [_streamed_record(target) for target in targets]
    if not all(map(_is_number, (*args[1:], *kwargs.values()))) or not all(records):
        return False
    for record in records:
        assert record is not None
        assert record.gradient is not None
        if record.gradient.is_aliased:  # an alias would show it late
            return False
        _ELEMENT_WISE[func](torch.empty(0, dtype=record.dtype), *args[1:], **kwargs)
    rest = [arg.clone() if isinstance(arg, Tensor) else arg for arg in args[1:]]
    named = {key: value.clone() if isinstance(value, Tensor) else value for key, value in kwargs.items()}
    for record in records:
        assert record is not None
        record.norms.clear()
        record.deferred.append(DeferredOp(call=_ELEMENT_WISE[func], args=tuple(rest), kwargs=named))
    return True


def _unscale(gradients: Sequence[Tensor], found_inf: Tensor, inverse_scale: Tensor) -> None:
    """Unscale gradients as ``GradScaler.unscale_`` does, a staging buffer at a time."""
    for gradient in gradients:
        record = _streamed_record(gradient)
        assert record is not None
        settle_gradient(record)
        _rewrite(record, lambda piece: _UNSCALE([piece], found_inf, inverse_scale))


def _rewrite(record: StoredParameter, change: Callable[[Tensor], object]) -> None:
    """Read the gradient at home, a staging buffer at a time, and write it back changed in place."""
    store, slot = record.store, record.gradient
    assert slot is not None
    store.check_usable(record)
    with store.failing_on_error():
        store.transfers.rewrite_value(slot, lambda piece, _: change(piece))
        store.transfers.wait_writes()


def _streamed_record(tensor: object) -> StoredParameter | None:
    """Return whose gradient on nvme a tensor is, if it is the one ``p.grad`` shows now."""
    record = tensor.record() if isinstance(tensor, HomeGradient) else None
    if record is None or record.gradient is None or record.gradient.in_memory:
        return None
    return record if record.gradient.shown is tensor else None


def _homes_in(args: Iterable[Any]) -> Iterator[HomeGradient]:
    for arg in args:
        if isinstance(arg, list | tuple):
            yield from _homes_in(arg)
        elif isinstance(arg, HomeGradient):
            yield arg


def _is_number(value: object) -> bool:
    """Return whether an argument is one number, whatever part of the gradient it meets."""
    if isinstance(value, Tensor):
        return type(value) is Tensor and value.dim() == 0 and not value.requires_grad
    return value is None or isinstance(value, int | float)
