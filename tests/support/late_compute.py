"""Compute that is late, as on a GPU: ops are enqueued on a stream, and another thread runs them.

Whoever enqueues an op gets its result at once, with nothing in it. So a copy that does not wait for compute copies
nonsense, and a host that looks at values before compute is done sees nonsense, too.

An op that makes a host wait for a GPU, as ``item``, ``nonzero`` and a copy to the host do, is an error: the runtime must not
wait in secret, and graphs with such ops are refused.
"""

import ctypes
import threading
import weakref
from bisect import bisect_right, insort
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch._ops import HigherOrderOperator
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from tests.support.caching_allocator import AllocatedBytes, CachingAllocator
from zinf_compile.runtime.execute import op_bodies
from zinf_compile.runtime.process.interrupts import without_interrupts

_POISON = 0xFF  # as floats NaN
_KEPT_NBYTES = 2**28  # of freed memory, whose addresses are not used again, so that no race is seen where there is none
_BELOW = [
    torch._C.DispatchKey.AutogradFunctionality,
    torch._C.DispatchKey.AutogradOther,
    torch._C.DispatchKey.ADInplaceOrView,
]
_PURE = ("logit_sums", "logit_sums_backward", "weigh_logit_sums", "scale_gradient")  # ops of ours that only compute
_deferring = threading.local()
_counting = threading.Lock()


class Enqueue(Protocol):
    """A stream that runs any work in order."""

    name: str

    def enqueue(self, work: Callable[[], None]) -> None:
        """Run it later."""

    def drain(self) -> None:
        """Block until all work is done; raise what it raised."""


@dataclass(slots=True, kw_only=True, eq=False)
class _Allocation:
    """Some of the device's memory. What runs late keeps ``memory``, so that its bytes stay, and not the tensors over it."""

    start: int
    nbytes: int
    memory: Tensor | None = None  # None if it is the user's
    pool: Enqueue | None = None  # to which it returns
    counted: AllocatedBytes | None = None
    is_in_place: bool = False  # host memory that ops read where it is
    num_copies: int = 0  # that are enqueued and have not run

    def count_copy(self, change: int) -> None:
        """Count a copy that is enqueued, or has run. Called from several threads."""
        with _counting:
            self.num_copies += change

    def give_back(self) -> None:
        """Return to the pool, whose next op may get these bytes, and find nonsense there."""
        if self.num_copies:
            raise AssertionError(
                f"{self.nbytes} bytes are free on the {self.pool.name} stream while a copy of them has not run"
            )
        ctypes.memset(self.start, _POISON, self.nbytes)


class DeviceMemory:
    """What the device has allocated, as torch's allocator for CUDA has it.

    Memory that is freed may be used at once by ops that are enqueued later on the stream for which it was allocated. So that
    stream must have waited for all copies from it and to it, which know addresses only.
    """

    def __init__(self, nbytes: int) -> None:
        self._allocator = CachingAllocator(nbytes)
        self._lock = threading.Lock()
        self._freed: deque[_Allocation] = deque()  # by finalizers, which may run while the lock is held
        self._kept: deque[_Allocation] = deque()
        self._kept_nbytes = 0
        self._starts: list[int] = []
        self._aliases: set[int] = set()  # storages over host memory through which ops read it in place
        self._by_start: dict[int, _Allocation] = {}

    @contextmanager
    def counted(self) -> Iterator[CachingAllocator]:
        """A block in which no other thread allocates; it knows all that has been freed."""
        with self._lock:
            while self._freed:
                freed = self._freed.popleft()
                if self._by_start.get(freed.start) is freed:
                    del self._by_start[freed.start]
                    self._starts.pop(bisect_right(self._starts, freed.start) - 1)
                if freed.counted is not None:
                    self._allocator.free(freed.counted)
                    self._keep(freed)
            yield self._allocator

    def close(self) -> None:
        """Return memory that was kept."""
        self._kept.clear()
        self._kept_nbytes = _KEPT_NBYTES  # and keep no more

    def _keep(self, freed: _Allocation) -> None:
        self._kept.append(freed)
        self._kept_nbytes += freed.nbytes
        while self._kept and self._kept_nbytes > _KEPT_NBYTES:
            self._kept_nbytes -= self._kept.popleft().nbytes

    def make(self, value: Tensor, pool: Enqueue) -> Tensor:
        """Return a tensor over the memory of a new value, which is the device's until no tensor is over it.

        torch.OutOfMemoryError if the device has no room for it.
        """
        storage = value.untyped_storage()
        made = _Allocation(start=storage.data_ptr(), nbytes=storage.nbytes(), memory=value, pool=pool)
        if not made.nbytes:
            return value
        with self.counted() as allocator:
            made.counted = allocator.allocate(made.nbytes, pool.name)
        alias = torch._C._construct_storage_from_data_pointer(made.start, value.device, made.nbytes)
        self._add(made, alias)
        return torch.empty(0, dtype=value.dtype, device=value.device).set_(
            alias, value.storage_offset(), value.shape, value.stride()
        )

    def add(self, tensor: Tensor) -> None:
        """Count the user's memory of a tensor as the device's until it is freed."""
        storage = tensor.untyped_storage()
        if storage.nbytes() and self.find(tensor) is None:
            self._add(_Allocation(start=storage.data_ptr(), nbytes=storage.nbytes()), storage)

    def add_in_place(self, alias: Tensor) -> None:
        """Let ops on an alias of host memory run late. Others on the same memory are the host's, which may reuse it."""
        storage = alias.untyped_storage()
        self._aliases.add(storage._cdata)
        weakref.finalize(storage, self._aliases.discard, storage._cdata).atexit = False
        start, nbytes = alias.data_ptr(), alias.numel() * alias.itemsize
        with self.counted():
            found = self._at(start)
            if found is not None and start + nbytes <= found.start + found.nbytes:
                return
            for inner in [each for each in self._starts if start <= each < start + nbytes]:  # tiles of it
                self._starts.remove(inner)
                del self._by_start[inner]
            insort(self._starts, start)
            self._by_start[start] = _Allocation(start=start, nbytes=nbytes, is_in_place=True)

    def is_in_place(self, tensor: Tensor) -> bool:
        """Return whether a tensor is host memory that ops read where it is."""
        found = self.find(tensor)
        return found is not None and found.is_in_place

    def _add(self, made: _Allocation, storage: torch.UntypedStorage) -> None:
        with self.counted():
            if made.start not in self._by_start:
                insort(self._starts, made.start)
            self._by_start[made.start] = made
        weakref.finalize(storage, self._free, made).atexit = False

    def _free(self, freed: _Allocation) -> None:
        self._freed.append(freed)
        if freed.pool is not None:
            freed.pool.enqueue(freed.give_back)

    def find(self, tensor: Tensor) -> _Allocation | None:
        """Return in which allocation of the device a tensor is; None if it is in none."""
        with torch._C.DisableTorchFunctionSubclass():
            address = tensor.data_ptr()
        with self.counted():
            found = self._at(address)
        if found is None or not found.is_in_place:
            return found
        with torch._C.DisableTorchFunctionSubclass():
            return found if tensor.untyped_storage()._cdata in self._aliases else None

    def _at(self, address: int) -> _Allocation | None:
        """Return the allocation at an address; None if there is none."""
        index = bisect_right(self._starts, address) - 1
        found = self._by_start[self._starts[index]] if index >= 0 else None
        return found if found is not None and address < found.start + found.nbytes else None

    def as_sent(self, tensor: Tensor) -> Tensor:
        """Return what an op that runs late is given for a tensor: its bytes, and on the host a copy of them.

        As on a GPU, it does not keep a tensor alive: what its caller frees may be allocated again before it has run.
        """
        found = self.find(tensor)
        if found is None:
            return tensor.clone()
        if found.memory is None or tensor.is_conj() or tensor.is_neg():
            return tensor
        with torch._C.DisableTorchFunctionSubclass():
            offset = (tensor.data_ptr() - found.start) // tensor.itemsize
            bytes_only = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
            return bytes_only.set_(found.memory.untyped_storage(), offset, tensor.shape, tensor.stride())

    def holds(self, tensor: Tensor) -> bool:
        """Return whether a tensor is on the device."""
        return self.find(tensor) is not None


def current_stream() -> Enqueue | None:
    """Return the stream on which ops of the calling thread are enqueued; None if they run at once."""
    streams: list[Enqueue] = getattr(_deferring, "streams", [])
    return streams[-1] if streams else None


@contextmanager
def below_autograd(*, are_excluded: bool) -> Iterator[None]:
    """A block in which ops record nothing for autograd, or may again."""
    with ExitStack() as stack:
        for key in _BELOW:
            was = torch._C._dispatch_tls_is_dispatch_key_excluded(key)
            torch._C._dispatch_tls_set_dispatch_key_excluded(key, are_excluded)
            stack.callback(torch._C._dispatch_tls_set_dispatch_key_excluded, key, was)
        yield


class LateCompute(TorchDispatchMode):
    """A block whose ops on device tensors run on a stream."""

    supports_higher_order_operators = True

    def __init__(self, stream: Enqueue, memory: DeviceMemory, *, makes_here: bool = False) -> None:
        """``makes_here``: what the block makes of no other tensor is the device's, but for scalars."""
        super().__init__()
        self._stream, self._memory, self._makes_here = stream, memory, makes_here

    def __enter__(self) -> "LateCompute":
        super().__enter__()
        _deferring.streams = [*getattr(_deferring, "streams", []), self._stream]
        return self

    def __exit__(self, *raised: Any) -> None:
        _deferring.streams = _deferring.streams[:-1]
        super().__exit__(*raised)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if isinstance(func, HigherOrderOperator):  # as those around random ops
            return self._run_now(func, args, kwargs)
        if func.namespace == "zinf" and func._opname not in _PURE:
            return self._run_ours(func, args, kwargs)
        leaves = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if not any(map(self._memory.holds, leaves)) or _is_view(func):
            made = func(*args, **kwargs)
            is_new = self._makes_here and not leaves and isinstance(made, Tensor) and made.dim() > 0
            return self._own(made) if is_new else made
        if not all(_is_known(each.type) for each in func._schema.returns) or _waits(func, leaves):
            raise _hidden(func)
        if func._schema.is_mutable:
            return self._change_later(func, args, kwargs)
        if torch.Tag.nondeterministic_seeded in func.tags:  # the order of random numbers is that of the calls
            return self._run_now(func, args, kwargs)
        return self._make_later(func, args, kwargs)

    def _run_ours(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run an op of ours now: its body enqueues, and queries autograd."""
        if func._opname == "run_segment":  # compiled code enqueues nothing here
            with below_autograd(are_excluded=False):
                return self._run_now(func, args, kwargs)
        body = without_interrupts(getattr(op_bodies, func._opname))
        inner = LateCompute(self._stream, self._memory)
        with below_autograd(are_excluded=False), inner:
            return body(*args, **kwargs)

    def _run_now(self, func: Any, args: Any, kwargs: Any) -> Any:
        self._stream.drain()
        return self._own(func(*args, **kwargs))

    def _change_later(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Enqueue an op that changes its arguments, and return those that it returns."""
        named = dict(zip((each.name for each in func._schema.arguments), args, strict=False)) | kwargs
        given = [each for each in func._schema.arguments if each.alias_info is not None and each.alias_info.is_write]
        returned = []
        for each in func._schema.returns:
            same = [
                named[argument.name]
                for argument in given
                if each.alias_info is not None and argument.alias_info.before_set == each.alias_info.before_set
            ]
            if len(same) != 1:  # it also makes something new
                return self._run_now(func, args, kwargs)
            returned.append(same[0])
        on_host = [leaf for each in given for leaf in _tensors(named.get(each.name)) if not self._memory.holds(leaf)]
        if on_host and all(each.dim() == 0 for each in on_host):  # step counts, which a GPU would have
            return self._run_now(func, args, kwargs)
        if on_host:  # a copy that the host waits for
            raise _hidden(func)
        args, kwargs = self._as_now((args, kwargs))
        self._stream.enqueue(lambda: func(*args, **kwargs))
        return None if not returned else returned[0] if len(returned) == 1 else tuple(returned)

    def _make_later(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Enqueue an op, and return what it will fill. To know its form, the op runs now, on whatever is there."""
        try:
            made = func(*args, **kwargs)
        except (RuntimeError, IndexError):  # as by indices that are not there yet
            return self._run_now(func, args, kwargs)
        results = _tensors(made)
        if any(each.layout is not torch.strided or self._memory.holds(each) for each in results):
            return self._run_now(func, args, kwargs)
        for each in results:
            each.untyped_storage().fill_(_POISON) if each.is_floating_point() else None
        made = self._own(made)
        args, kwargs = self._as_now((args, kwargs))

        def make() -> None:
            for there, value in zip(results, _tensors(func(*args, **kwargs)), strict=True):
                there.data.copy_(value)

        self._stream.enqueue(make)
        return made

    def _as_now(self, given: Any) -> Any:
        """Return arguments of an op with scalars of the host as they are now: a GPU is sent their values."""
        return tree_map_only(Tensor, self._memory.as_sent, given)

    def _own(self, made: Any) -> Any:
        """Return results as tensors of the device, those that are not yet."""

        def own(each: Tensor) -> Tensor:
            is_new = each.layout is torch.strided and each.is_cpu and not self._memory.holds(each)
            return self._memory.make(each, self._stream) if is_new else each

        return tree_map_only(Tensor, own, made)


def _hidden(func: Any) -> AssertionError:
    return AssertionError(f"{func} makes the host wait for the device")


def _tensors(made: Any) -> Sequence[Tensor]:
    return [leaf for leaf in tree_leaves(made) if isinstance(leaf, Tensor)]


def _is_view(func: Any) -> bool:
    """Return whether an op returns other views of its arguments, and computes nothing."""
    infos = [each.alias_info for each in func._schema.returns]
    return bool(infos) and all(each is not None and not each.is_write for each in infos)


def _is_known(kind: Any) -> bool:
    """Return whether a result needs no value to be known: a tensor, several, none, or a size, as attention returns."""
    if isinstance(kind, torch.ListType | torch.OptionalType):
        return _is_known(kind.getElementType())
    return isinstance(kind, torch.TensorType | torch.IntType)


def _waits(func: Any, given: Sequence[Tensor]) -> bool:
    """Return whether an op makes the host wait for its values."""
    if func is torch.ops.aten.index.Tensor:  # how many a mask picks is not known before
        return any(each.dtype in (torch.bool, torch.uint8) for each in given[1:])
    tags = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)
    return any(tag in func.tags for tag in tags)
