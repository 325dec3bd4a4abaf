"""Models of the tests of ranks, and how they are trained: on ranks, and in one process that accumulates their batches."""

import copy
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional

import zinf_compile
from tests.support.traces import Trace
from zinf_compile.passes.planner.placement import homes

KIB = 2**10
_THRESHOLD = homes.RESIDENT_THRESHOLD


class TinyGPT(nn.Module):
    """Embedding, two blocks of attention and MLP, and a head that shares the embedding's weight. No size is even."""

    def __init__(self, *, width: int = 60, vocabulary: int = 51) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(2))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Return the loss."""
        hidden = self.embed(tokens)
        for block in self.blocks:
            hidden = block(hidden)
        logits = self.head(self.norm(hidden))
        return functional.cross_entropy(logits.view(-1, logits.shape[-1]), targets.view(-1))


class Block(nn.Module):
    """Attention and an MLP."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attend, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 3 * width + 1), nn.Linear(3 * width + 1, width)

    def forward(self, hidden: Tensor) -> Tensor:
        """Return the hidden states after the block."""
        query, key, value = self.attend(self.norm(hidden)).chunk(3, dim=-1)
        attended = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        hidden = hidden + self.project(attended)
        return hidden + self.down(functional.gelu(self.up(self.second(hidden))))


def build_gpt(seed: int = 0) -> nn.Module:
    """Return a TinyGPT, the same on every rank."""
    torch.manual_seed(seed)
    return TinyGPT()


def build_frozen(seed: int = 0) -> nn.Module:
    """Return one whose first block and embedding are frozen, with adapters of rank 3 beside two layers."""
    torch.manual_seed(seed)
    model = TinyGPT()
    for parameter in (*model.embed.parameters(), *model.blocks[0].parameters()):
        parameter.requires_grad_(False)
    return model


class Small(nn.Module):
    """An embedding, an MLP and a head, whose rows are whole sectors in 16s.

    With ``num_ranks`` it computes the layers of ``tiles`` in plain PyTorch as so many ranks do, by tiles.
    """

    def __init__(self, num_ranks: int = 0, tiles: Mapping[str, int] | None = None) -> None:
        super().__init__()
        self.embed = nn.Embedding(51, 64, padding_idx=49)
        self.up, self.down, self.head = nn.Linear(64, 193), nn.Linear(193, 64), nn.Linear(64, 51, bias=False)
        for name, num_tiles in (TILES if tiles is None else tiles).items():
            layer = self.get_submodule(name.removesuffix(".weight"))
            if num_ranks and isinstance(layer, nn.Linear):
                layer.forward = functools.partial(by_tiles, layer, blocks_of(layer.out_features, num_tiles, num_ranks))

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Return the loss."""
        hidden = self.embed(tokens)
        hidden = hidden + self.down(functional.gelu(self.up(hidden)))
        return functional.cross_entropy(self.head(hidden).flatten(0, 1), targets.flatten())


TILES = {"embed.weight": 2, "head.weight": 2, "up.weight": 4}


def blocks_of(num_rows: int, num_tiles: int, num_ranks: int) -> list[list[int]]:
    """Return how many rows each tile has of each rank's, by rank: a tile has as many of each, in whole sectors."""
    shards = [len(shard) for shard in torch.arange(num_rows).chunk(num_ranks)]
    window = -(-shards[0] // (16 * num_tiles)) * 16
    firsts = range(0, shards[0], window)
    return [[min(window, max(0, shard - first)) for first in firsts] for shard in shards]


def by_tiles(layer: nn.Linear, blocks: list[list[int]], x: Tensor) -> Tensor:
    """Return the output of a layer that is computed by tiles."""
    num_tiles = len(blocks[0])

    def cut(value: Tensor) -> list[Tensor]:
        parts = value.split([block for of_rank in blocks for block in of_rank])
        return [torch.cat(parts[tile::num_tiles]) for tile in range(num_tiles)]

    biases = [None] * num_tiles if layer.bias is None else cut(layer.bias)
    tiles = [functional.linear(x, weight, bias) for weight, bias in zip(cut(layer.weight), biases, strict=True)]
    if len(blocks) == 1:
        return torch.cat(tiles, -1)
    pieces = [each.split([of_rank[number] for of_rank in blocks], -1) for number, each in enumerate(tiles)]
    return torch.cat([piece[rank] for rank in range(len(blocks)) for piece in pieces], -1)


def build_small(num_ranks: int = 0, tiles: Mapping[str, int] | None = None) -> nn.Module:
    """Return a Small, the same on every rank."""
    torch.manual_seed(0)
    return Small(num_ranks, tiles)


def batch_of(step: int, rank: int) -> Mapping[str, Tensor]:
    """Return the tokens of a rank at a step."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    tokens = torch.randint(0, 51, (2, 9), generator=generator)
    return {"tokens": tokens[:, :-1].contiguous(), "targets": tokens[:, 1:].contiguous()}


@dataclass(frozen=True, kw_only=True)
class Loop:
    """A training loop."""

    build: Callable[[], nn.Module] = build_gpt
    num_steps: int = 3
    num_accumulated: int = 1
    clip: float | None = None
    optimizer: str = "AdamW"
    optimizer_options: Mapping[str, Any] = field(default_factory=lambda: {"lr": 1e-2, "weight_decay": 0.1})
    divide_by: float | None = None  # None: the number of ranks
    looks_at_gradients: bool = True  # before the step

    def make_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """Return the optimizer of the trained parameters."""
        made: torch.optim.Optimizer = getattr(torch.optim, self.optimizer)(model.parameters(), **self.optimizer_options)
        return made


def train_alone(
    loop: Loop,
    num_ranks: int,
    *,
    reduces_once: bool = False,
    after_step: Callable[[nn.Module, torch.optim.Optimizer, int], None] | None = None,
) -> Trace:
    """Return the numbers of one process in plain PyTorch that accumulates the batches of so many ranks in their order.

    Ranks that reduce once per step have added up their own micro-batches before. ``after_step`` is called with the number of
    each step.
    """
    torch.set_num_threads(1)
    model, trace = loop.build(), Trace()
    optimizer = loop.make_optimizer(model)
    for step in range(loop.num_steps):
        sums: dict[str, Tensor] = {}
        micros, ranks = range(loop.num_accumulated), range(num_ranks)
        rounds = [[(micro, rank)] for micro in micros for rank in ranks]
        if reduces_once:
            rounds = [[(micro, rank) for micro in micros] for rank in ranks]
        losses: dict[tuple[int, int], Tensor] = {}
        reduced: dict[str, Tensor] = {}
        for number, batches in enumerate(rounds):
            for micro, rank in batches:
                loss = model(**batch_of(step * loop.num_accumulated + micro, rank))
                loss.backward()
                losses[micro, rank] = loss.detach().clone()
            own = {name: each.grad for name, each in model.named_parameters() if each.grad is not None}
            is_first = number % num_ranks == 0
            reduced = own if is_first else {name: reduced[name] + grad for name, grad in own.items()}
            if (number + 1) % num_ranks == 0:
                for name, total in reduced.items():
                    divided = total / (loop.divide_by or num_ranks)
                    sums[name] = sums[name] + divided if name in sums else divided
            model.zero_grad()
        trace.losses += [losses[micro, rank] for micro in micros for rank in ranks]
        for name, parameter in model.named_parameters():
            parameter.grad = sums.get(name)
        if loop.clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), loop.clip)
        trace.record_gradients(model)
        optimizer.step()
        optimizer.zero_grad()
        if after_step is not None:
            after_step(model, optimizer, step)
        trace.record_model(model, optimizer)
    return trace


def optimize(model: nn.Module, options: Mapping[str, Any]) -> nn.Module:
    """Optimize a model on this rank. With the option ``streams`` nothing is resident for being small, as all of it is.

    The option ``mesh`` may be the shape of one, as (2, 2).
    """
    given = dict(options)
    if isinstance(given.get("mesh"), tuple):
        names = ("replicate", "shard")[-len(given["mesh"]) :]
        given["mesh"] = init_device_mesh("cpu", given["mesh"], mesh_dim_names=names)
    homes.RESIDENT_THRESHOLD = 0 if given.pop("streams", False) else _THRESHOLD
    optimized = zinf_compile.optimize(model, **given)
    assert isinstance(optimized, nn.Module)
    return optimized


def train_on_ranks(loop: Loop, options: Mapping[str, Any]) -> Trace:
    """Return the numbers of a rank: its own losses, and full gradients, parameters and states. Called on each rank."""
    model = optimize(loop.build(), options)
    optimizer = loop.make_optimizer(model)
    trace = Trace()
    for step in range(loop.num_steps):
        looks = loop.looks_at_gradients and not options.get("step_in_backward")
        train_step(loop, model, optimizer, step, trace, looks_at_gradients=looks)
    check_at_rest(model)
    zinf_compile.close(model)
    return trace


def train_step(
    loop: Loop,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    step: int,
    trace: Trace,
    *,
    looks_at_gradients: bool = True,
) -> None:
    """Train one step, and record its numbers."""
    for micro in range(loop.num_accumulated):
        loss = model(**batch_of(step * loop.num_accumulated + micro, dist.get_rank()))
        loss.backward()
        trace.losses.append(loss.detach().clone())
    if loop.clip is not None:
        torch.nn.utils.clip_grad_norm_(model.parameters(), loop.clip)
    if looks_at_gradients:
        trace.gradients.append({name: full(parameter.grad) for name, parameter in model.named_parameters()})
    optimizer.step()
    optimizer.zero_grad()
    record_full(trace, model, optimizer)


def record_full(trace: Trace, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Record the full values of parameters and states after a step. Called on each rank."""
    trace.parameters.append({name: full(parameter) for name, parameter in model.named_parameters()})
    trace.buffers.append({})
    states = optimizer.state_dict()["state"]
    trace.states.append(
        {f"{index} {key}": full(value) for index, state in states.items() for key, value in state.items()}
    )


def values_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Return the full values of parameters and states, by name. Called on each rank."""
    weights, states = get_state_dict(model, optimizer)
    values = {name: full(value) for name, value in weights.items()}
    for name, state in states["state"].items():
        values |= {f"{name}/{key}": full(value) for key, value in state.items()}
    return values


def check_at_rest(model: nn.Module) -> None:
    """Check every pool of the store of a model."""
    from zinf_compile.runtime.params.records import record_of
    from zinf_compile.runtime.store.store import store_of

    (store, *_) = {store_of(record) for each in model.parameters() if (record := record_of(each)) is not None}
    store.check_integrity()


def full(tensor: Tensor | None) -> Tensor | None:
    """Return a copy of the full value of a DTensor, or of any other tensor."""
    if tensor is None:
        return None
    whole = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return whole.detach().clone()


def of_rank(plain: Trace, rank: int, num_ranks: int) -> Trace:
    """Return a trace of ``train_alone`` with the losses of one rank."""
    return replace(copy.copy(plain), losses=plain.losses[rank::num_ranks])


def placements(folder: str) -> dict[str, Mapping[str, Any]]:
    """Return budgets that put parameters on each tier, for a TinyGPT on two or three ranks."""
    common = {"compute": "aten", "reserve_memory": 0, "nvme": folder}
    return {
        "nvme": {**common, "streams": True, "device_memory": 520 * KIB, "host_memory": 560 * KIB},
        "resident": {**common, "device_memory": 2048 * KIB, "host_memory": 1024 * KIB},
    }


def numbers_of(traces: Sequence[Trace]) -> list[int]:
    """Return how many records there are, so that a test can see that something was compared."""
    return [len(trace.losses) for trace in traces]
