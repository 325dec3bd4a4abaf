"""Reads from code that Inductor has generated how many bytes it allocates while it runs.

That is less than its ops would allocate one by one: what is fused is never stored, and buffers are reused. The code is
Python that allocates, launches kernels, and deletes::

    buf0 = empty_strided_cuda((16384, 32000), (32000, 1), torch.bfloat16)
    extern_kernels.mm(arg0_1, arg1_1, out=buf0)
    buf2 = reinterpret_tensor(buf0, (8, 2048, 32000), (65536000, 32000, 1), 0); del buf0  # reuse
    buf3 = torch.ops.aten._scaled_dot_product_flash_attention.default(buf2, ...)
    buf4 = buf3[0]
    return (buf2, )

What is not understood, such as sizes that are known only when it runs, makes the answer None. Inductor estimates a peak
itself while it schedules, but not for code that it finds in its cache.
"""

import ast
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, fx
from torch._prims_common import compute_required_storage_length

from zinf_compile.ir.ops import attention_scratch

_ALLOCATIONS = ("empty_strided_cuda", "empty_strided_cpu")
_NO_ALLOCATION = ("get_raw_stream",)


@contextmanager
def collecting_code() -> Iterator[list[str]]:
    """A block in which Inductor adds all code that it generates, or finds in its cache, to the list."""
    from torch._inductor.graph import GraphLowering  # takes a second, and is needed only to compile

    found: list[str] = []
    before = GraphLowering.save_output_code

    def save(code: str) -> None:
        found.append(code)
        if before is not None:
            before(code)

    GraphLowering.save_output_code = staticmethod(save)  # the hook that torch's own tests use; None by default
    try:
        yield found
    finally:
        GraphLowering.save_output_code = None if before is None else staticmethod(before)


def count_compiled_workspace(code: str, segment: fx.Graph) -> int | None:
    """Return the most bytes that compiled code has allocated at once, less those of its results; None if unknown.

    ``segment`` is the graph that was compiled: ops that the code calls by name return what they return there.
    """
    calls = [node for node in ast.walk(ast.parse(code)) if isinstance(node, ast.FunctionDef) and node.name == "call"]
    if len(calls) != 1:
        return None
    try:
        return _Allocations(segment).run(calls[0])
    except _UnknownError:
        return None


class _UnknownError(Exception):
    """The code is not understood."""


@dataclass(slots=True, eq=False)
class _Block:
    """One allocation, or all results of one op; freed with its last name."""

    nbytes: int
    num_names: int = 0


class _Allocations:
    """Follows the statements of one generated function."""

    def __init__(self, segment: fx.Graph) -> None:
        # Bytes that ops return, and that their kernels allocate beside that, by the name of the op, in graph order.
        self._results: dict[str, list[tuple[int, int]]] = {}
        for node in segment.nodes:
            if isinstance(node.target, torch._ops.OpOverload) and "val" in node.meta:
                values = node.meta["val"] if isinstance(node.meta["val"], list | tuple) else [node.meta["val"]]
                sizes = [_storage_nbytes(value) for value in values if isinstance(value, Tensor)]
                scratch = attention_scratch(node, _storage_nbytes)
                self._results.setdefault(f"torch.ops.{node.target}", []).append((sum(sizes), scratch))
        self._names: dict[str, _Block | None] = {}  # None: an input, which is the caller's
        self._live = self._peak = 0

    def run(self, function: ast.FunctionDef) -> int:
        returned = self._follow(function.body)
        if returned is None:
            raise _UnknownError
        blocks = {self._names.get(name.id) for name in ast.walk(returned) if isinstance(name, ast.Name)}
        return max(0, self._peak - sum(block.nbytes for block in blocks if block is not None))

    def _follow(self, statements: Sequence[ast.stmt]) -> ast.expr | None:
        """Return what a ``return`` among the statements returns."""
        for statement in statements:
            match statement:
                case ast.With():
                    if (returned := self._follow(statement.body)) is not None:
                        return returned
                case ast.Assign(targets=[ast.Name(id=name)], value=value):
                    self._name(name, self._block_of(value))
                case ast.Assign(targets=[ast.Tuple(elts=inputs) | ast.List(elts=inputs)], value=ast.Name(id="args")):
                    self._names.update((each.id, None) for each in inputs if isinstance(each, ast.Name))
                case ast.Delete(targets=targets):
                    for target in targets:
                        if not isinstance(target, ast.Name):
                            raise _UnknownError
                        self._unname(target.id)
                case ast.Return(value=value) if value is not None:
                    return value
                case ast.Expr(value=ast.Call()):
                    pass  # a kernel that writes to buffers, a check, or the choice of a device
                case _:
                    raise _UnknownError
        return None

    def _block_of(self, value: ast.expr) -> _Block | None:
        """Return the memory of a value, which may be new; None for that of inputs, and of what is no tensor."""
        match value:
            case ast.Name(id=name) | ast.Subscript(value=ast.Name(id=name)) if name in self._names:
                return self._names[name]
            case ast.Call(func=ast.Name(id="reinterpret_tensor"), args=[ast.Name(id=name), *_]) if name in self._names:
                return self._names[name]
            case ast.Call(func=ast.Name(id=name), args=[shape, strides, dtype]) if name in _ALLOCATIONS:
                return self._allocate(_empty_nbytes(shape, strides, dtype))
            case ast.Call(func=ast.Name(id=name)) if name in _NO_ALLOCATION:
                return None
            case ast.Call(func=ast.Attribute() as function):
                name = ast.unparse(function)
                if self._results.get(name):
                    nbytes, scratch = self._results[name].pop(0)
                    block = self._allocate(nbytes)
                    self._peak = max(self._peak, self._live + scratch)
                    return block
                return self._reduce(function)
        raise _UnknownError

    def _reduce(self, function: ast.Attribute) -> _Block:
        """Return the memory of a reduction or copy of a buffer, by its methods: no more than the buffer has."""
        source: ast.expr = function
        while not isinstance(source, ast.Name):
            match source:
                case ast.Attribute(value=inner) | ast.Subscript(value=inner) | ast.Call(func=inner):
                    source = inner
                case _:
                    raise _UnknownError
        block = self._names.get(source.id)
        if block is None:
            raise _UnknownError
        return self._allocate(block.nbytes)

    def _allocate(self, nbytes: int) -> _Block:
        self._live += nbytes
        self._peak = max(self._peak, self._live)
        return _Block(nbytes)

    def _name(self, name: str, block: _Block | None) -> None:
        if block is not None:
            block.num_names += 1
        if name in self._names:
            self._unname(name)
        self._names[name] = block

    def _unname(self, name: str) -> None:
        if name not in self._names:
            raise _UnknownError
        block = self._names.pop(name)
        if block is not None:
            block.num_names -= 1
            self._live -= 0 if block.num_names else block.nbytes


def _empty_nbytes(shape: ast.expr, strides: ast.expr, dtype: ast.expr) -> int:
    try:
        sizes, steps = ast.literal_eval(shape), ast.literal_eval(strides)
    except ValueError:  # a symbol
        raise _UnknownError from None
    kind = getattr(torch, dtype.attr, None) if isinstance(dtype, ast.Attribute) else None
    if not isinstance(kind, torch.dtype):
        raise _UnknownError
    return compute_required_storage_length(sizes, steps, 0) * kind.itemsize


def _storage_nbytes(value: Tensor) -> int:
    sizes, strides = tuple(value.shape), tuple(value.stride())
    if not all(isinstance(each, int) for each in (*sizes, *strides)):
        raise _UnknownError
    return compute_required_storage_length(sizes, strides, 0) * value.dtype.itemsize
