"""Home tensors of optimizer state that is stored in codes: they have no values in memory, and decode them at each look.

What is written into one in place is encoded again, and so rounded. A view of the decoded values, or an array over them, may
be written too: what was written is encoded at the next look or step, or when the view is gone. A view that outlives a
step has the values before it.
"""

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from zinf_compile.ir.errors import UnsupportedError
from zinf_compile.runtime.params.home import CHANGES_SHAPE, DATA_GET, DATA_SET, HomeTensor, looks_at_values
from zinf_compile.runtime.process.inference import outside_inference
from zinf_compile.runtime.storage.slots import local_of
from zinf_compile.runtime.storage.state_codes import Paged

_TELL_NO_WRITES = frozenset({DATA_GET, Tensor.numpy, Tensor.__array__})  # they do not share the count of versions
_NEED_MEMORY = frozenset(
    {*CHANGES_SHAPE, Tensor.data_ptr, Tensor.untyped_storage, Tensor.storage, Tensor.set_, Tensor.share_memory_}
)


class _Alias:
    """Decoded values of which a user holds views, or an array."""

    def __init__(self, value: Tensor, num_own: int, *, tells_writes: bool) -> None:
        self.value, self._num_own = value, num_own
        self._version = value._version if tells_writes else None
        self.views: list[weakref.ref[Any]] = []

    def is_held(self, *, but: int = 0) -> bool:
        """Return whether there are views still, beside ``but`` that are about to go."""
        return num_references(self.value) - but > self._num_own

    def take_written(self) -> bool:
        """Return whether the values may have been written since this was asked last."""
        if self._version is None:
            return True
        written, self._version = self.value._version != self._version, self.value._version
        return written


class CodedHomeTensor(HomeTensor, Tensor):
    """A home tensor of optimizer state that is stored in codes."""

    _zinf_pages: Tensor
    coded: Paged
    _aliases: list[_Alias]
    _num_writes: int  # by users: what is rounded stochastically is so anew each time

    @classmethod
    def of(cls, coded: Paged, pages: Tensor) -> "CodedHomeTensor":
        """Return the home tensor of some pages."""
        made: CodedHomeTensor = Tensor._make_wrapper_subclass(
            cls, coded.slice.sizes, dtype=coded.dtype, device=pages.device
        )
        made.coded, made._zinf_pages, made._aliases, made._num_writes = coded, pages, [], 0
        return made

    def move(self, pages: Tensor) -> None:
        """Show the values of other pages, and forget what was written into views of the old ones."""
        self._zinf_pages, self._aliases = pages, []

    @property
    def is_aliased(self) -> bool:
        """Return whether a user holds a view of decoded values, or an array over them."""
        return bool(self._aliases)

    def flush(self) -> None:
        """Encode what was written into views. Nothing is in flight for it."""
        for alias in self._aliases:
            if alias.take_written():
                self._encode(alias.value)
        self._aliases = [alias for alias in self._aliases if alias.is_held()]

    def forget_aliases(self) -> None:
        """Forget the views that there are: a step gives the state other values."""
        self._aliases = []

    @staticmethod
    def _run(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return _run_decoded(func, args, kwargs) if looks_at_values(func) else func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # the supertype's are not optional
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Run an op that torch calls by itself."""
        return _run_decoded(func, args, kwargs or {})

    def _as_plain(self) -> Tensor:
        self.flush()
        with outside_inference():  # a tensor that counts its versions
            return self.coded.value(self._zinf_pages)

    def _encode(self, value: Tensor) -> None:
        first = self.coded.slice.flat.start
        self.coded.encode(value.reshape(-1), self._zinf_pages, first=first, seed=self._num_writes)
        self._num_writes += 1

    def _stands_for_result(self, func: Callable[..., Any]) -> bool:
        """Return whether what a function returns of its decoded values is this home tensor."""
        return True

    def _watch(self, value: Tensor, num_own: int, result: Any, *, tells_writes: bool) -> None:
        """Remember the views of ``value`` that a function returned. It had ``num_own`` references to its memory before."""
        storage = value.untyped_storage()._cdata
        views = [leaf for leaf in tree_leaves(result) if not isinstance(leaf, Tensor) or _is_over(leaf, storage)]
        views = [view for view in views if view is not value and _is_array(view)]
        if not views:
            return
        alias, home = _Alias(value, num_own, tells_writes=tells_writes), weakref.ref(self)

        def forget(view: "weakref.ref[Any]") -> None:
            alias.views = [each for each in alias.views if each is not view]
            if alias.views or (self := home()) is None or not any(each is alias for each in self._aliases):
                return
            if alias.is_held(but=1):  # a view of the view
                return
            self._aliases = [each for each in self._aliases if each is not alias]
            record = self.record()
            if record is not None and record.update.future is None and alias.take_written():
                self._encode(alias.value)

        alias.views = [weakref.ref(view, forget) for view in views]
        self._aliases.append(alias)


def coded_home(value: object) -> CodedHomeTensor | None:
    """Return the home tensor of codes that an entry of an optimizer's state is, or a DTensor over one; else None."""
    local = local_of(value) if isinstance(value, Tensor) else None
    return local if isinstance(local, CodedHomeTensor) else None


def num_references(value: Tensor) -> int:
    """Return how many tensors hold the memory of a tensor."""
    count: int = torch._C._storage_Use_Count(value.untyped_storage()._cdata)
    return count


def _is_array(result: object) -> bool:
    """Return whether a result is a tensor, or an array of numpy, and no number."""
    return isinstance(result, Tensor) or hasattr(result, "__array_interface__")


def _is_over(tensor: Tensor, storage: int) -> bool:
    """Return whether a result is a view of some memory."""
    return tensor.layout is torch.strided and bool(tensor.untyped_storage()._cdata == storage)


def _run_decoded(func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Run a function with decoded values in the place of coded home tensors, and encode those that it wrote.

    What it returns of these values is the home tensors again.
    """
    if func in _NEED_MEMORY and isinstance(args[0], CodedHomeTensor):
        raise UnsupportedError(
            f"state that is stored as {args[0].coded.code} has no memory for '{getattr(func, '__name__', func)}': its "
            "values are decoded at each look; take a copy, as state.clone() is, and write it back by state.copy_(copy)"
        )
    decoded: dict[int, tuple[CodedHomeTensor, Tensor, int]] = {}

    def value_of(home: CodedHomeTensor) -> Tensor:
        if id(home) not in decoded:
            value = home._as_plain()
            decoded[id(home)] = home, value, num_references(value)
        return decoded[id(home)][1]

    if func == DATA_SET:
        func = Tensor.copy_
    args, kwargs = tree_map_only(CodedHomeTensor, value_of, (args, kwargs))
    versions = [value._version for _, value, _ in decoded.values()]
    result = func(*args, **kwargs)
    homes = {id(value): home for home, value, _ in decoded.values() if home._stands_for_result(func)}
    writes = isinstance(func, torch._ops.OpOverload) and func._schema.is_mutable  # below what counts versions
    for (home, value, num_own), version in zip(decoded.values(), versions, strict=True):
        if writes or value._version != version:
            home._encode(value)
        # What is below autograd makes views that do not share the count of versions, as the ops of a DTensor are.
        tells_writes = func not in _TELL_NO_WRITES and not isinstance(func, torch._ops.OpOverload)
        home._watch(value, num_own, result, tells_writes=tells_writes)
    return tree_map_only(Tensor, lambda tensor: homes.get(id(tensor), tensor), result)
