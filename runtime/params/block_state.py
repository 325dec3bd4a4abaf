"""Home tensors of optimizer state in torchao's codes: each look at one makes a tensor of torchao's, with these codes.

It has the attributes of that tensor. What is written into one in place is written to the store; what is written into its
``codes`` or ``scale`` is so at the next look or step.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves

from zinf_compile.runtime.params.coded_state import CodedHomeTensor, num_references
from zinf_compile.runtime.storage.state_blocks import Blocked
from zinf_compile.runtime.storage.state_codes import Paged

_INNER = ("codes", "scale")
_ATTRIBUTES = frozenset({*_INNER, "qmap", "signed", "block_size", "tensor_attrs", "dequantize", "_shape"})


class _Looked:
    """The inner tensors of a tensor of torchao's that was made for a look, which a user may hold and write."""

    def __init__(self, value: Tensor, coded: Blocked) -> None:
        self._inner: list[Tensor] = [getattr(value, name).detach() for name in _INNER]
        self._coded = coded
        self._versions = [each._version for each in self._inner]

    @property
    def value(self) -> Tensor:
        """Return a tensor of torchao's over them."""
        return self._coded.over(*self._inner)

    def is_held(self) -> bool:
        """Return whether others have them still."""
        return any(num_references(each) > 1 for each in self._inner)

    def take_written(self) -> bool:
        """Return whether they were written since this was asked last."""
        before, self._versions = self._versions, [each._version for each in self._inner]
        return before != self._versions


class BlockHomeTensor(CodedHomeTensor):
    """A home tensor of optimizer state that is stored in torchao's codes."""

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the tensor of torchao's that it stands for."""
        if name not in _ATTRIBUTES:
            raise AttributeError(f"'{type(self).__name__}' object has no attribute '{name}'", name=name, obj=self)
        value = self.plain()
        if name in _INNER:
            self._look(value)
        return getattr(value, name)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        """Return a tensor of torchao's in memory."""
        copied: Tensor = memo.setdefault(id(self), self.plain())
        return copied

    def _encode(self, value: Tensor) -> None:
        self.coded.encode(value, self._zinf_pages)

    def _stands_for_result(self, func: Callable[..., Any]) -> bool:
        return str(getattr(func, "__name__", "")).endswith("_")  # in place: else a result is a copy, as of ``to``

    def _watch(self, value: Tensor, num_own: int, result: Any, *, tells_writes: bool) -> None:
        if any(type(leaf) is type(value) and leaf is not value for leaf in tree_leaves(result)):
            self._look(value)

    def _look(self, value: Tensor) -> None:
        coded: Any = self.coded
        looks: list[Any] = self._aliases
        looks.append(_Looked(value, coded))


def show_pages(coded: Paged, pages: Tensor) -> Tensor:
    """Return the home tensor of some pages."""
    kind = BlockHomeTensor if isinstance(coded, Blocked) else CodedHomeTensor
    return kind.of(coded, pages)
