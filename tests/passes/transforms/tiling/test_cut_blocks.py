"""Blocks cut along their samples: which are, their results and gradients, and that ops which mix samples are refused."""

import random
import re
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from zinf_compile.passes.contract import TileInputs
from zinf_compile.passes.pipeline import tile_graph
from zinf_compile.passes.transforms.tiling.cut_blocks import Block, WholeBlock, find_blocks

N = 4  # samples
Function = Callable[[Tensor], Tensor]


class _OneBlock(nn.Module):
    """Computes a function in a repeated block."""

    def __init__(self, function: Function) -> None:
        super().__init__()
        self.layers = nn.ModuleList([_Calls(function)])

    def forward(self, x: Tensor) -> Tensor:
        return self.layers[0](x)


class _Calls(nn.Module):
    def __init__(self, function: Function) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x * 2.0) + 1.0


def _input(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, requires_grad=True, generator=torch.Generator().manual_seed(0))


def _cut(captured: Any, micro_batches: int) -> None:
    tile_graph(captured.graph_module, TileInputs(micro_batches=micro_batches))


WEIGHT = torch.linspace(-1, 1, 48, dtype=torch.float64).view(6, 8)
BY_SAMPLE: dict[str, Function] = {
    "linear": lambda x: F.linear(x, WEIGHT[:, :8]),
    "matmul": lambda x: x @ WEIGHT.t(),
    "view": lambda x: x.view(N, 6, 2, 4),
    "view of a list": lambda x: x.view((N, -1)),
    "view with a size to find": lambda x: x.view(-1, 6, 4, 2),
    "rows of all samples": lambda x: F.linear(x.view(-1, 8), WEIGHT).view(N, 6, 6),
    "reshape": lambda x: x.reshape(N * 6, 8).tanh().reshape(N, 48),
    "flatten": lambda x: x.flatten(1),
    "flatten samples": lambda x: x.flatten(0, 1).relu(),
    "unflatten": lambda x: x.unflatten(-1, (2, 4)).exp(),
    "unflatten before": lambda x: x.transpose(0, 1).unflatten(0, (2, 3)).exp(),
    "transpose": lambda x: x.transpose(1, 2).contiguous(),
    "samples in the middle": lambda x: x.transpose(0, 1).contiguous().sin(),
    "permute": lambda x: x.permute(2, 0, 1).cos(),
    "unsqueeze": lambda x: x.unsqueeze(0).tanh().squeeze(0),
    "unsqueeze at the end": lambda x: x.unsqueeze(-1).exp(),
    "expand": lambda x: x.unsqueeze(1).expand(N, 3, 6, 8).tanh(),
    "expand as it is": lambda x: x.unsqueeze(1).expand(-1, 3, -1, -1).tanh(),
    "softmax": lambda x: F.softmax(x, dim=-1),
    "softmax method": lambda x: x.softmax(1),
    "mean": lambda x: x.mean(-1, keepdim=True) * x,
    "mean positional": lambda x: x.mean(-1, True) * x,
    "sum of two": lambda x: x.sum((1, 2)),
    "sum before": lambda x: x.transpose(0, 1).sum(0),
    "variance": lambda x: x.var(dim=-1, keepdim=True, unbiased=False) + x,
    "split": lambda x: x.split(4, dim=-1)[0] * x.split(4, dim=-1)[1],
    "chunk": lambda x: torch.chunk(x, 2, 1)[1].exp(),
    "unbind": lambda x: x.view(N, 6, 2, 4).permute(2, 0, 1, 3).unbind(0)[1].exp(),
    "part": lambda x: x[..., :4] * x[:, :, 4:],
    "part before": lambda x: x.transpose(0, 1)[2].exp(),
    "new dimension": lambda x: x[:, None, 1:3].exp(),
    "narrow": lambda x: x.narrow(1, 1, 2).exp(),
    "cat": lambda x: torch.cat([-x[..., 4:], x[..., :4]], dim=-1),
    "cat with something": lambda x: torch.cat([x, torch.ones(N, 1, 8, dtype=x.dtype)], 1).exp(),
    "cat with nothing": lambda x: torch.cat([torch.empty(0, dtype=x.dtype), x], dim=-1).exp(),
    "stack": lambda x: torch.stack([x, x.exp()], dim=0).sum(0),
    "repeat": lambda x: x.view(N, 6, 2, 4).repeat_interleave(2, dim=2).exp(),
    "where": lambda x: torch.where(x > 0, x, x.exp()),
    "attention": lambda x: F.scaled_dot_product_attention(*[x.view(N, 6, 2, 4).transpose(1, 2)] * 3, is_causal=True),
    "rms_norm": lambda x: F.rms_norm(x, (8,), WEIGHT[0]),
    "layer_norm": lambda x: F.layer_norm(x, (8,)),
    "addmm": lambda x: torch.addmm(WEIGHT[0, :6], x.view(-1, 8), WEIGHT.t()).view(N, 6, 6),
    "a constant for each sample": lambda x: x * torch.arange(N, dtype=x.dtype).view(N, 1, 1),
    "stack along an axis": lambda x: torch.stack([x, x.exp()], axis=1).sum(1),
    "chunk along an axis": lambda x: torch.chunk(x, 2, axis=1)[1].exp(),
    "compared with what has an axis more": lambda x: (
        (x > torch.zeros(3, 1, 1, 8, dtype=x.dtype)).to(x.dtype).sum(0) + x
    ),
    "compared with one for each sample": lambda x: torch.where(x > torch.arange(N).view(N, 1, 1), x, x.exp()),
    "squeeze of another dimension": lambda x: x.unsqueeze(2).squeeze(2).exp(),
    "mm by name": lambda x: torch.mm(x.view(-1, 8), mat2=WEIGHT.t()).view(N, 6, 6),
    "in eval": lambda x: F.dropout(x, 0.5, False).exp(),
    "glu": lambda x: F.silu(x[..., :4]) * x[..., 4:],
}
MIXING: dict[str, tuple[Function, str]] = {
    "softmax": (lambda x: x.softmax(0), "softmax reads all samples"),
    "sum": (lambda x: x.exp() / x.sum(), "sum reads all samples"),
    "mean": (lambda x: x - x.mean((0, 1), keepdim=True), "mean reads all samples"),
    "cumsum": (lambda x: torch.cumsum(x, 0), "cumsum reads all samples"),
    "part": (lambda x: x[:1] * x, "getitem reads some of the samples"),
    "index": (lambda x: x[torch.arange(N).flip(0)].exp(), "may mix samples|reads samples by their number"),
    "split": (lambda x: x.split(2)[0].exp(), "split reads some of the samples"),
    "cat": (lambda x: torch.cat([x, x]).exp(), "cat joins samples along their own dimension"),
    "products of samples": (lambda x: x.transpose(0, 1) @ x.permute(1, 2, 0), "matmul may mix samples"),
    "joined behind another": (lambda x: x.transpose(0, 1).reshape(6 * N, 8).exp(), "reshape joins samples"),
    "batch_norm": (lambda x: F.batch_norm(x, None, None, training=True), "batch_norm may mix samples"),
    "roll": (lambda x: x.roll(1, 0).exp(), "roll may mix samples"),
    "flip": (lambda x: x.flip(0).exp(), "flip may mix samples"),
    "sort": (lambda x: x.sort(0).values.exp(), "sort may mix samples"),
    "squeeze of samples": (lambda x: x.squeeze(0).exp() * x, "may remove the dimension of the samples"),
    "stack of samples by name": (lambda x: torch.cat([x, x], axis=0).exp(), "cat joins samples along their own"),
    "first operand by name": (lambda x: F.softmax(input=x.exp(), dim=-1).exp(), "softmax is called with"),
    "depthwise": (
        lambda x: F.conv1d(x.transpose(0, 1), torch.ones(N, 1, 3, dtype=x.dtype), groups=N, padding=1).exp(),
        "conv1d may mix samples",
    ),
    "group norm of one value": (lambda x: F.group_norm(x[:, :, :1, None].exp(), 6).exp(), "refuses 1 of 4|may mix"),
    "in place": (lambda x: x.exp().add_(1.0), "add_ may write in place"),
    "in place by name": (lambda x: F.relu(x.exp(), inplace=True), "relu may write in place"),
}


@pytest.mark.parametrize("micro_batches", [2, N])
@pytest.mark.parametrize("name", BY_SAMPLE)
def test_results_and_gradients_of_what_is_computed_by_sample(name, micro_batches, capture):
    captured = capture(_OneBlock(BY_SAMPLE[name]), _input(N, 6, 8))
    expected = captured.run()
    (block,) = find_blocks(captured.graph_module.graph)
    assert isinstance(block, Block), block.why
    assert block.num_samples == N
    _cut(captured, micro_batches)
    assert any(node.name.endswith("_samples") for node in captured.graph_module.graph.nodes)
    ours = captured.run()
    assert ours.keys() == expected.keys()
    for result, value in expected.items():
        torch.testing.assert_close(ours[result], value, rtol=1e-13, atol=1e-14)


@pytest.mark.parametrize("name", MIXING)
def test_what_mixes_samples_is_refused_with_its_name(name, capture):
    function, message = MIXING[name]
    captured = capture(_OneBlock(function), _input(N, 6, 8))
    before = str(captured.graph_module.graph)
    found = list(find_blocks(captured.graph_module.graph))
    wholes = [block for block in found if isinstance(block, WholeBlock)]
    if not wholes:  # it does not mix along the second dimension, which is then taken for that of the samples
        assert [block.num_samples for block in found if isinstance(block, Block)] == [6]
        expected = captured.run()
        _cut(captured, 3)
        torch.testing.assert_close(captured.run(), expected, rtol=1e-13, atol=1e-14)
        return
    (block,) = wholes
    assert re.search(message, block.why), block.why
    _cut(captured, 2)
    assert str(captured.graph_module.graph) == before


STEPS: Sequence[Function] = (
    lambda x: x.transpose(-1, -2),
    lambda x: x.reshape(x.shape[0], -1),
    lambda x: x.reshape(-1, x.shape[-1]),
    lambda x: x.reshape(*x.shape[:-1], 2, x.shape[-1] // 2),
    lambda x: x.transpose(0, 1),
    lambda x: x.unsqueeze(0),
    lambda x: x.unsqueeze(1),
    lambda x: x.softmax(-1),
    lambda x: x.softmax(0),
    lambda x: x.mean(0, keepdim=True),
    lambda x: x.mean(-1),
    lambda x: x.sum(1),
    lambda x: x[0],
    lambda x: x[..., : x.shape[-1] // 2],
    lambda x: x[:, None],
    lambda x: torch.cat([x, x.exp()], -1),
    lambda x: torch.stack([x, x], 1),
    lambda x: x @ x.transpose(-1, -2),
    lambda x: x.permute(*range(1, x.dim()), 0),
    lambda x: x.flatten(),
    lambda x: x.chunk(2, 0)[0],
    lambda x: x.unbind(0)[0],
    lambda x: x.tanh().contiguous(),
    lambda x: x.expand(2, *x.shape),
    lambda x: x.squeeze(0),
    lambda x: x.squeeze(1),
    lambda x: torch.cat([x, x.exp()], axis=1),
    lambda x: torch.stack([x, x.exp()], axis=1),
    lambda x: x.chunk(2, axis=1)[0],
    lambda x: (x > torch.zeros(4, 1, 1)).to(x.dtype) * x,
    lambda x: torch.where(x > torch.zeros(6, 1), x, x.exp()),
)


@pytest.mark.parametrize("seed", [*range(20), *(pytest.param(seed, marks=pytest.mark.long) for seed in range(20, 200))])
def test_chains_that_are_drawn_are_refused_or_give_the_same(seed, capture):
    drawn = random.Random(seed)

    def chain(x: Tensor) -> Tensor:
        for step in steps:
            x = step(x).sin()
        return x

    steps: list[Function] = []
    while len(steps) < 5:
        steps.append(drawn.choice(STEPS))
        try:
            chain(torch.randn(N, 6, 8))
        except (RuntimeError, IndexError):
            steps.pop()
    captured = capture(_OneBlock(chain), _input(N, 6, 8))
    expected = captured.run()
    for block in list(find_blocks(captured.graph_module.graph)):
        if isinstance(block, Block):
            _cut(captured, block.num_samples)
    torch.testing.assert_close(captured.run(), expected, rtol=1e-12, atol=1e-13)


class _Twins(nn.Module):
    """Its block returns two views of one tensor, and it writes to one of them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([_MakesTwins()])

    def forward(self, x: Tensor) -> Tensor:
        one, other = self.layers[0](x)
        one.mul_(0.5)
        return other.exp()


class _MakesTwins(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = x * 2.0 + 1.0
        return x, x.flatten(1)


def test_a_block_that_returns_one_tensor_twice_stays_whole(capture):
    captured = capture(_Twins(), _input(N, 6, 8))
    expected = captured.run()
    (block,) = find_blocks(captured.graph_module.graph)
    assert isinstance(block, WholeBlock)
    assert "returns memory that something else in the block has as well" in block.why
    _cut(captured, 2)
    torch.testing.assert_close(captured.run(), expected, rtol=0, atol=0)


class _Turned(nn.Module):
    """Views what its block returns in a way that depends on strides."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([_Turns()])

    def forward(self, x: Tensor) -> Tensor:
        return self.layers[0](x).transpose(1, 2).view(N, 48).exp()


class _Turns(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return (x * 2.0).tanh().exp().transpose(1, 2)


def test_a_result_keeps_its_strides(capture):
    captured = capture(_Turned(), _input(N, 6, 8))
    expected = captured.run()
    (block,) = find_blocks(captured.graph_module.graph)
    assert isinstance(block, Block)
    _cut(captured, 2)
    torch.testing.assert_close(captured.run(), expected, rtol=1e-13, atol=1e-14)


def test_a_block_under_autocast_of_its_own_stays_whole(capture):
    def autocast(x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return (x @ x.transpose(1, 2)).float().exp()

    captured = capture(_OneBlock(autocast), _input(N, 6, 8).float())
    (block,) = find_blocks(captured.graph_module.graph)
    assert isinstance(block, WholeBlock)
    assert "autocast" in block.why


class _Shared(nn.Module):
    """Reads one block twice, and something in between."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([_Calls(lambda x: x.tanh())])

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers[0](x)
        x = x * x.mean()
        return self.layers[0](x)


class _Viewed(nn.Module):
    """Writes to what its block returns, and so to what the block was given."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([_Views()])

    def forward(self, x: Tensor) -> Tensor:
        x = x * 2.0
        y = self.layers[0](x)
        y.add_(1.0)
        return x.exp()


class _Views(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.view(N, 48).view(N, 6, 8)


def test_a_block_that_returns_a_view_stays_whole(capture):
    captured = capture(_Viewed(), _input(N, 6, 8))
    expected = captured.run()
    (block,) = find_blocks(captured.graph_module.graph)
    assert isinstance(block, WholeBlock)
    assert block.why == "view returns memory that something else in the block has as well"
    _cut(captured, 2)
    torch.testing.assert_close(captured.run(), expected, rtol=0, atol=0)


def test_a_block_that_runs_twice_is_cut_twice(capture):
    captured = capture(_Shared(), _input(N, 6, 8))
    expected = captured.run()
    assert [block.num_samples for block in find_blocks(captured.graph_module.graph)] == [N, N]
    _cut(captured, 2)
    wholes = [node.name for node in captured.graph_module.graph.nodes if node.name.endswith("_whole")]
    assert len(wholes) == 2
    torch.testing.assert_close(captured.run(), expected, rtol=1e-13, atol=1e-14)


def test_micro_batches_come_one_after_another(capture):
    captured = capture(_OneBlock(lambda x: x.tanh().exp()), _input(N, 6, 8))
    _cut(captured, 2)
    names = [node.name for node in captured.graph_module.graph.nodes if node.op in ("call_function", "call_method")]
    numbers = [name.rpartition("_batch_")[2] for name in names if "_batch_" in name]
    assert numbers == ["0"] * 4 + ["1"] * 4  # mul, tanh, exp and add
    assert names[-1].endswith("_whole")


def _train_cut(model: nn.Module, batch: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return the loss and gradients of a model whose blocks are cut, and for each block "cut" or why it is not."""
    found: dict[str, str] = {}

    def backend(graph_module: fx.GraphModule, _: Sequence[Tensor]) -> Callable[..., Any]:
        for block in find_blocks(graph_module.graph):
            found[block.name] = "cut" if isinstance(block, Block) else block.why
        tile_graph(graph_module, TileInputs(micro_batches=2))
        return graph_module.forward

    torch._dynamo.reset()
    return _train(torch.compile(model, backend=backend, dynamic=False), model, batch), found


def _train(call: Callable[..., Any], model: nn.Module, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    model.zero_grad()
    made = call(**batch)
    loss = made.square().sum() if isinstance(made, Tensor) else made.loss
    loss.backward()
    gradients = {name: each.grad for name, each in model.named_parameters() if each.grad is not None}
    return {"loss": loss.detach()} | {name: gradient.clone() for name, gradient in gradients.items()}


ROUTED = "grouped_mm_fallback may mix samples"
MODELS: dict[str, dict[str, str]] = {
    "llama": {"model.layers": "cut"},
    "gpt2": {"transformer.h": "cut"},
    "qwen3": {"model.layers": "cut"},
    "mixtral": {"layers": ROUTED},
    "bert": {"bert.encoder.layer": "cut"},
    "t5": {"encoder.block": "cut", "decoder.block": "cut"},
    "vit": {"vit.layers": "cut"},
}


OFTEN = ("llama", "mixtral", "t5")  # of each kind one; the others in `make test-long`


@pytest.mark.parametrize(
    "name", [name if name in OFTEN else pytest.param(name, marks=pytest.mark.long) for name in MODELS]
)
def test_blocks_of_transformers(name):
    models = pytest.importorskip("tests.support.transformer_models")
    model, batches = getattr(models, name)()
    dtype = torch.float32 if name == "mixtral" else torch.float64  # its experts have no kernel for the other
    model.to(dtype).train()
    batch = {key: each.to(dtype) if each.is_floating_point() else each for key, each in batches[0].items()}
    ours, found = _train_cut(model, batch)
    first_of_t5 = {"encoder.block.0", "decoder.block.0"} if name == "t5" else set()  # adds a mask in place
    for block, how in found.items():
        expected = MODELS[name][block.rpartition(".")[0]]
        assert how == expected or (block in first_of_t5 and "in place" in how), f"{block}: {how}"
    rtol, atol = (1e-4, 1e-6) if name == "mixtral" else (1e-11, 1e-13)
    torch.testing.assert_close(ours, _train(model, model, batch), rtol=rtol, atol=atol)


@pytest.mark.parametrize("batch_first", [True, False])
def test_blocks_of_torch(batch_first):
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=batch_first, dtype=torch.float64)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    x = torch.randn(N, 6, 8, dtype=torch.float64)
    padding = torch.zeros(N, 6, dtype=torch.bool)
    padding[1:, 4:] = True
    batch = {"src": x if batch_first else x.transpose(0, 1).contiguous(), "src_key_padding_mask": padding}
    ours, found = _train_cut(model, batch)
    assert found == {"layers.0": "cut", "layers.1": "cut"}
    torch.testing.assert_close(ours, _train(model, model, batch), rtol=1e-11, atol=1e-13)
