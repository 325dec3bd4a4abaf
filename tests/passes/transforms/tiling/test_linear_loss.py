"""The loss of a linear layer without materialising its logits: cross-entropy with all options, in little memory."""

import itertools
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.support.called_ops import CalledOps
from tests.support.examples import examples
from zinf_compile.ir import ops
from zinf_compile.passes.transforms.tiling.linear_loss import linear_cross_entropy
from zinf_compile.runtime.execute.logit_sums import logit_sums, logit_sums_backward, weigh_logit_sums
from zinf_compile.runtime.execute.op_bodies import register

CLASSES, FEATURES = 300, 5
CHECKS = ("test_schema", "test_faketensor", "test_autograd_registration")


@pytest.fixture(autouse=True)
def _bodies() -> None:
    register()


def _inputs(
    rows: int, *, dtype: torch.dtype = torch.float64, bias: bool = True, seed: int = 0
) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def make(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()

    target = torch.randint(0, CLASSES, (rows,), generator=generator)
    return make(rows, FEATURES), make(CLASSES, FEATURES), make(CLASSES) if bias else None, target


def _with_gradients(loss: Tensor, leaves: list[Tensor]) -> list[Tensor]:
    on_loss = torch.linspace(0.5, 2.0, loss.numel(), dtype=loss.dtype).view(loss.shape)
    return [loss.detach(), *torch.autograd.grad(loss, leaves, on_loss)]


@examples(150, derandomize=False)
@given(
    rows=st.integers(1, 9),
    tile_rows=st.one_of(st.none(), st.integers(1, 10)),
    class_tiles=st.lists(st.integers(1, CLASSES - 1), max_size=3, unique=True),
    one_pass=st.booleans(),
    bias=st.booleans(),
    weighted=st.booleans(),
    label_smoothing=st.sampled_from([0.0, 0.1, 1.0]),
    reduction=st.sampled_from(["mean", "sum", "none"]),
    ignore_index=st.sampled_from([-100, 7]),
    ignored=st.booleans(),
    seed=st.integers(0, 3),
)
def test_it_is_the_cross_entropy_of_the_logits(
    rows: int,
    tile_rows: int | None,
    class_tiles: list[int],
    one_pass: bool,
    bias: bool,
    weighted: bool,
    label_smoothing: float,
    reduction: str,
    ignore_index: int,
    ignored: bool,
    seed: int,
) -> None:
    hidden, weight, offset, target = _inputs(rows, bias=bias, seed=seed)
    if ignored and rows > 1:
        target[rows // 2] = ignore_index
    class_weight = torch.linspace(0.1, 2.0, CLASSES, dtype=torch.float64) if weighted else None
    options: dict[str, Any] = {
        "ignore_index": ignore_index,
        "label_smoothing": label_smoothing,
        "reduction": reduction,
    }
    leaves = [leaf for leaf in (hidden, weight, offset) if leaf is not None]
    expected = F.cross_entropy(F.linear(hidden, weight, offset), target, class_weight, **options)
    sizes = [stop - start for start, stop in itertools.pairwise([0, *sorted(class_tiles), CLASSES])]
    measured = linear_cross_entropy(
        *(hidden, weight.split(sizes) if class_tiles else weight, target, offset),
        **options,
        class_weight=class_weight,
        tile_rows=tile_rows,
        one_pass=one_pass,
    )
    pairs = zip(_with_gradients(measured, leaves), _with_gradients(expected, leaves), strict=True)
    for ours, theirs in pairs:
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10, equal_nan=True)


@pytest.mark.parametrize("one_pass", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_it_is_no_less_exact_than_plain_torch(dtype: torch.dtype, one_pass: bool) -> None:
    hidden, weight, _, target = _inputs(64, dtype=dtype, bias=False)
    exact = _loss_and_gradients(hidden.double(), weight.double(), target, tiled=False)
    plain = _loss_and_gradients(hidden, weight, target, tiled=False)
    tiled = _loss_and_gradients(hidden, weight, target, tiled=True, one_pass=one_pass)
    for theirs, ours, reference in zip(plain, tiled, exact, strict=True):
        theirs_off = torch.linalg.vector_norm(theirs.double() - reference)
        ours_off = torch.linalg.vector_norm(ours.double() - reference)
        assert ours_off <= 1.5 * theirs_off + torch.finfo(dtype).eps * torch.linalg.vector_norm(reference)


def _loss_and_gradients(hidden: Tensor, weight: Tensor, target: Tensor, *, tiled: bool, **options: Any) -> list[Tensor]:
    hidden, weight = hidden.detach().requires_grad_(), weight.detach().requires_grad_()
    if tiled:
        loss = linear_cross_entropy(hidden, weight, target, **options)
    else:
        loss = F.cross_entropy(F.linear(hidden, weight), target)
    return [loss.detach(), *torch.autograd.grad(loss, [hidden, weight])]


def test_near_a_perfect_fit_gradients_keep_their_digits() -> None:
    """There the gradient of the target's logit is a small difference of two numbers near one."""
    weight = torch.eye(CLASSES, FEATURES).to(torch.bfloat16)
    hidden = (12.0 * weight[:FEATURES]).clone()
    hidden[:, 0] += 4.0
    target = torch.arange(FEATURES)
    exact = _loss_and_gradients(hidden.double(), weight.double(), target, tiled=False)[1]
    for one_pass in (True, False):
        ours = _loss_and_gradients(hidden, weight, target, tiled=True, one_pass=one_pass)[1]
        resolution = 16 * torch.finfo(torch.float32).eps  # for logits of this size
        torch.testing.assert_close(ours.double(), exact, rtol=2**-6, atol=resolution)


@pytest.mark.parametrize("sizes", [[CLASSES], [100, 150, 50]], ids=str)
@pytest.mark.parametrize("one_pass", [True, False])
def test_classes_that_cannot_be_have_no_share(one_pass: bool, sizes: list[int]) -> None:
    """A vocabulary padded with a bias of minus infinity, which covers all of the first strip and the first tiles."""
    hidden, weight, bias, target = _inputs(4)
    assert bias is not None
    bias = bias.detach().index_fill(0, torch.arange(280), -torch.inf).requires_grad_()
    target = 280 + target % 20
    leaves = [hidden, weight, bias]
    tiles = weight.split(sizes) if len(sizes) > 1 else weight
    expected = _with_gradients(F.cross_entropy(F.linear(hidden, weight, bias), target), leaves)
    measured = _with_gradients(linear_cross_entropy(hidden, tiles, target, bias, one_pass=one_pass), leaves)
    for ours, theirs in zip(measured, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("num_tiles", [1, 3])
@pytest.mark.parametrize("wrong", [-1, CLASSES])
def test_a_target_that_is_no_class_is_refused(wrong: int, num_tiles: int) -> None:
    hidden, weight, _, target = _inputs(4, bias=False)
    target[2] = wrong
    with pytest.raises((RuntimeError, IndexError), match=r"out of bounds"):
        linear_cross_entropy(hidden, weight.tensor_split(num_tiles) if num_tiles > 1 else weight, target)


def test_an_unknown_reduction_is_refused() -> None:
    hidden, weight, _, target = _inputs(4, bias=False)
    with pytest.raises(ValueError, match="reduction 'avg' is not 'mean', 'sum' or 'none'"):
        linear_cross_entropy(hidden, weight, target, reduction="avg")


class _Largest(TorchDispatchMode):
    """Records the size of the largest tensor that any op returns."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for value in result if isinstance(result, tuple | list) else [result]:
            if isinstance(value, Tensor):
                self.numel = max(self.numel, value.numel())
        return result


@pytest.mark.parametrize("one_pass", [True, False])
def test_logits_never_exist_whole(one_pass: bool) -> None:
    hidden, weight, _, target = _inputs(64, bias=False)
    plain = (hidden.detach(), weight.detach(), None, target, None)
    rows = torch.ones(64, dtype=torch.float64)
    with _Largest() as seen:
        if one_pass:
            weigh_logit_sums(*plain, rows, -rows, None, 8, [True, True, False])
        else:
            logsumexp, picked, _ = logit_sums(*plain, 0, True, 8)
            logit_sums_backward(rows, -rows, None, logsumexp, picked, *plain, 0, True, 8, [True, True, False])
    assert seen.numel <= 64 * CLASSES // 4


@pytest.mark.parametrize("one_pass", [True, False])
@pytest.mark.parametrize("weighted", [True, False])
def test_on_a_gpu_there_are_few_kernels_and_the_host_waits_for_none(one_pass: bool, weighted: bool) -> None:
    """On the meta device, where an op whose result has a size that depends on values cannot run at all."""
    num_rows, num_tiles = 4096, 8
    hidden, weight, bias = (
        torch.empty(shape, dtype=torch.bfloat16, device="meta") for shape in ((num_rows, 64), (32_000, 64), (32_000,))
    )
    target, rows = (torch.empty(num_rows, dtype=dtype, device="meta") for dtype in (torch.int64, torch.float32))
    layer = (hidden, weight, bias, target, bias.float() if weighted else None)
    on_weighted, tile, wanted = rows if weighted else None, num_rows // num_tiles, [True, True, True]
    with CalledOps() as seen:
        if one_pass:
            weigh_logit_sums(*layer, rows, rows, on_weighted, tile, wanted)
        else:
            logit_sums(*layer, 0, True, tile)
            logit_sums_backward(rows, rows, on_weighted, rows, rows, *layer, 0, True, tile, wanted)
    assert not {torch.ops.aten.nonzero.default, torch.ops.aten._local_scalar_dense.default} & {*seen.ops}
    views = ("view", "slice", "select", "t", "unsqueeze", "expand", "alias", "detach", "permute")
    kernels = [op for op in seen.ops if op.overloadpacket.__name__ not in views]
    assert len(kernels) <= 200 * num_tiles  # with strips as for a cache there are 5000 and more


def test_what_is_frozen_gets_no_gradient() -> None:
    hidden, weight, _, target = _inputs(6, bias=False)
    loss = linear_cross_entropy(hidden, weight.detach(), target)
    (measured,) = torch.autograd.grad(loss, [hidden])
    (expected,) = torch.autograd.grad(F.cross_entropy(F.linear(hidden, weight), target), [hidden])
    torch.testing.assert_close(measured, expected)


@pytest.mark.parametrize("one_pass", [True, False])
def test_backward_may_run_twice(one_pass: bool) -> None:
    hidden, weight, _, target = _inputs(6, bias=False)
    loss = linear_cross_entropy(hidden, weight, target, one_pass=one_pass)
    first, second = (torch.autograd.grad(3.0 * loss, [hidden, weight], retain_graph=True) for _ in range(2))
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))


@pytest.mark.parametrize("one_pass", [True, False])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_it_compiles_whole(one_pass: bool, reduction: str) -> None:
    hidden, weight, bias, target = _inputs(6)
    assert bias is not None

    def loss_of(hidden: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return linear_cross_entropy(hidden, weight, target, bias, one_pass=one_pass, reduction=reduction)

    torch._dynamo.reset()
    compiled = torch.compile(loss_of, backend="aot_eager", fullgraph=True)
    leaves = [hidden, weight, bias]
    pairs = zip(_with_gradients(compiled(*leaves), leaves), _with_gradients(loss_of(*leaves), leaves), strict=True)
    for ours, theirs in pairs:
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("weigh", [True, False])
def test_the_ops_keep_their_promises(dtype: torch.dtype, weigh: bool) -> None:
    hidden, weight, bias, target = _inputs(6, dtype=dtype)
    sums = ops.sums_dtype(dtype)
    rows = torch.rand(6, dtype=sums)
    class_weight = torch.rand(CLASSES).to(dtype) if weigh else None
    on_weighted = rows if weigh else None
    layer = (hidden, weight, bias if weigh else None, target, class_weight)
    wanted = [True, True, weigh]
    torch.library.opcheck(ops.WEIGH_LOGIT_SUMS, (*layer, rows, -rows, on_weighted, 4, wanted), test_utils=CHECKS)
    torch.library.opcheck(ops.LOGIT_SUMS, (*layer, 0, True, 4))
    plain = [value.detach() if isinstance(value, Tensor) else value for value in layer]
    torch.library.opcheck(ops.LOGIT_SUMS_BACKWARD, (rows, -rows, on_weighted, rows, rows, *plain, 0, True, 4, wanted))
    torch.library.opcheck(ops.SCALE_GRADIENT, (torch.rand(6, 5, dtype=sums), torch.tensor(0.5, dtype=sums), dtype))
