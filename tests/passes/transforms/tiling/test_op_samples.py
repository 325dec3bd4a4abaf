"""Outputs and gradients of every legal tiling of every op in the table, on torch's sample inputs, in float64.

`make test` takes some samples of each op, evenly spread over torch's list of them; `make test-long` takes all.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import settings
from torch import Tensor, fx

from zinf_compile.passes.transforms.tiling.calls import arguments_of
from zinf_compile.passes.transforms.tiling.table import legal_tilings
from zinf_compile.passes.transforms.tiling.tile_chain import tile_node
from zinf_compile.passes.transforms.tiling.tilings import OUTPUT, Tiling

FUNCTIONAL = (
    *("linear", "conv1d", "conv2d", "conv3d", "scaled_dot_product_attention", "layer_norm", "rms_norm"),
    *("relu", "relu6", "leaky_relu", "hardtanh", "gelu", "silu", "mish", "elu", "selu", "celu", "softplus", "softsign"),
    *("hardswish", "hardsigmoid", "logsigmoid", "tanhshrink"),
)
PLAIN = (
    *("matmul", "mm", "bmm", "neg", "abs", "sign", "sqrt", "reciprocal", "add", "sub", "mul", "div"),
    *("maximum", "minimum", "clamp", "where", "masked_fill", "sigmoid", "tanh", "exp", "exp2", "expm1"),
    *("log", "log1p", "log2", "rsqrt", "square", "pow", "sin", "cos", "erf", "addcmul", "addcdiv", "lerp"),
)
FUNCTIONS: dict[str, Callable[..., Tensor]] = {f"nn.functional.{name}": getattr(F, name) for name in FUNCTIONAL}
FUNCTIONS |= {name: getattr(torch, name) for name in PLAIN}
_SOME = 6  # samples per op variant


@pytest.fixture(scope="module")
def infos() -> dict[str, list[Any]]:
    """Return torch's ``OpInfo`` entries by op name, one per variant. A fixture, since importing them takes seconds."""
    profile = settings.get_current_profile_name()
    from torch.testing._internal.common_methods_invocations import op_db

    settings.load_profile(profile)  # torch's module loads a hypothesis profile of its own
    found: dict[str, list[Any]] = {}
    for info in op_db:
        if info.name in FUNCTIONS:
            found.setdefault(info.name, []).append(info)
    return found


def test_torch_has_samples_of_each_op(infos: dict[str, list[Any]]) -> None:
    assert infos.keys() == FUNCTIONS.keys()


def test_the_samples_leave_the_hypothesis_profile_of_this_suite(
    infos: dict[str, list[Any]], request: pytest.FixtureRequest
) -> None:
    assert settings.get_current_profile_name() == (request.config.getoption("--hypothesis-profile") or "short")


@pytest.mark.parametrize("most", [_SOME, pytest.param(None, marks=pytest.mark.long)], ids=["some", "all"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_tiled_op_is_the_op(
    name: str, most: int | None, infos: dict[str, list[Any]], capture_call: Callable[..., Any]
) -> None:
    for info in infos[name]:
        samples = list(info.sample_inputs("cpu", torch.float64, requires_grad=True))
        num_checked = 0
        for sample in samples[:: 1 if most is None else -(-len(samples) // most)]:
            args = (sample.input, *sample.args)
            if name == "where":  # the samples are for value.where(condition, other)
                args = (args[1], args[0], args[2])
            num_checked += _check_call(capture_call, FUNCTIONS[name], args, sample.kwargs)
        assert num_checked > 0, info.full_name


@pytest.mark.parametrize(
    "options", [{}, {"padding_idx": 3}, {"padding_idx": -1}, {"scale_grad_by_freq": True}], ids=str
)
def test_a_tiled_embedding_is_the_embedding(options: dict[str, Any], capture_call: Callable[..., Any]) -> None:
    """Checked separately, because torch's samples have the arguments of ``embedding`` in a different order."""
    weight = torch.randn(7, 5, dtype=torch.float64, requires_grad=True)
    indices = torch.tensor([[0, 3, 6, 3], [1, 5, 6, 0]])
    num_axes = 1 if "scale_grad_by_freq" in options else 4
    assert _check_call(capture_call, F.embedding, (indices, weight), options) >= 2 * num_axes


@pytest.mark.parametrize(
    ("is_causal", "mask"),
    [(False, None), (True, None), *((False, mask) for mask in ((1, 1, 6, 9), (2, 4, 6, 9), (6, 9), (1, 9)))],
    ids=str,
)
@pytest.mark.parametrize("num_keys", [9, 4])
def test_tiled_attention_with_grouped_heads_is_attention(
    is_causal: bool, mask: tuple[int, ...] | None, num_keys: int, capture_call: Callable[..., Any]
) -> None:
    query = torch.randn(2, 4, 6, 8, dtype=torch.float64, requires_grad=True)
    key, value = (torch.randn(2, 2, num_keys, 8, dtype=torch.float64, requires_grad=True) for _ in range(2))
    options: dict[str, Any] = {"is_causal": is_causal, "enable_gqa": True}
    if mask is not None:
        options["attn_mask"] = torch.randn(mask, dtype=torch.float64)[..., :num_keys]
    num_checked = _check_call(capture_call, F.scaled_dot_product_attention, (query, key, value), options)
    assert num_checked >= 5  # batch and heads in two tiles, queries in two, three and six


@pytest.mark.parametrize("function", [torch.relu, torch.sqrt, torch.neg, torch.reciprocal])
def test_what_is_rounded_once_keeps_its_bits_beyond_whole_vectors(
    function: Callable[..., Tensor], capture_call: Callable[..., Any]
) -> None:
    value = torch.rand(37, 41, dtype=torch.float64).add_(0.1).requires_grad_()
    assert _check_call(capture_call, function, (value,), {}) == 6


def _check_call(
    capture_call: Callable[..., Any],
    function: Callable[..., Tensor],
    args: tuple[Any, ...],
    options: dict[str, Any],
) -> int:
    """Compare a call with each of its tilings, into 2, 3 and the most possible tiles. Return how many."""
    if (
        any(isinstance(value, Tensor) and value.dtype is not torch.bool for value in args[:1])
        and function is torch.where
    ):
        return 0  # fake tensors accept only boolean conditions
    captured = capture_call(function, args, options)
    expected = captured.run()
    num_checked = 0
    for tiling in legal_tilings(captured.result):
        for num_tiles in sorted({2, min(3, tiling.size), tiling.size}):
            tiled = capture_call(function, args, options)
            operands = _operands(tiled.result)
            tile_node(tiled.result, tiling, num_tiles)
            _compare(tiled.run(), expected, operands, tiling)
            num_checked += 1
    return num_checked


def _operands(node: fx.Node) -> dict[str, str]:
    """Return the names of the operands and the output by the names of the captured tensors."""
    named = {argument.name: name for name, argument in arguments_of(node).items() if isinstance(argument, fx.Node)}
    return {"output": OUTPUT} | named


def _compare(
    measured: dict[str, Tensor], expected: dict[str, Tensor], operands: dict[str, str], tiling: Tiling
) -> None:
    assert measured.keys() == expected.keys()
    for name, value in expected.items():
        message = f"{operands[name]} under {tiling}"
        tolerance = 0.0 if operands[name] in tiling.exact else 1e-10
        torch.testing.assert_close(
            measured[name],
            value,
            rtol=tolerance,
            atol=tolerance,
            equal_nan=True,
            msg=lambda text, message=message: f"{message}: {text}",
        )
