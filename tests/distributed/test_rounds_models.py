"""Ranks that work in rounds, on models as users write them: in-place writes, modes, checkpoint regions, graph breaks."""

import re
import time
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from tests.distributed.test_rounds import joined, train_in_rounds
from tests.distributed.workloads import Block, Loop, placements, train_alone
from tests.support.rank_pool import Raised, RankPool
from tests.support.traces import assert_same


class Deep(nn.Module):
    """An embedding, four blocks and a head; the way through the blocks is that of a class below."""

    def __init__(self, *, width: int = 24, vocabulary: int = 51) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(4))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def through(self, hidden: Tensor) -> Tensor:
        """Return what the blocks make of hidden states."""
        for block in self.blocks:
            hidden = block(hidden)
        return hidden

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Return the loss."""
        logits = self.head(self.norm(self.through(self.embed(tokens))))
        return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


class Shifting(Deep):
    """Writes to tensors that it makes of the inputs, as the decoder of T5 does."""

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Return the loss."""
        shifted = tokens.new_zeros(tokens.shape)
        shifted[..., 1:] = tokens[..., :-1]
        shifted[..., 0] = 3
        shifted.masked_fill_(shifted == 7, 8)
        hidden = self.embed(shifted)
        weights = torch.ones_like(targets, dtype=hidden.dtype)
        weights[..., 2] = 0.5
        for block in self.blocks:
            hidden = block(hidden) + weights[..., None]
        logits = self.head(self.norm(hidden))
        return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


class Checkpointed(Deep):
    """Recomputes its blocks, one of them inside of another region."""

    def through(self, hidden: Tensor) -> Tensor:
        """Return what the blocks make of hidden states."""
        first, second, third, last = self.blocks

        def both(hidden: Tensor) -> Tensor:
            return third(checkpoint(second, hidden, use_reentrant=False))

        hidden = checkpoint(both, checkpoint(first, hidden, use_reentrant=False), use_reentrant=False)
        return checkpoint(last, hidden, use_reentrant=False)


class Breaking(Deep):
    """Has a graph break between blocks; what comes before it is read by several blocks behind it."""

    def through(self, hidden: Tensor) -> Tensor:
        """Return what the blocks make of hidden states."""
        first, second, third, last = self.blocks
        early = first(hidden)
        hidden = second(early)
        torch._dynamo.graph_break()
        return last(third(hidden) + early) + early


class Mixed(Deep):
    """Enters and leaves autocast and ``no_grad`` between its blocks."""

    def through(self, hidden: Tensor) -> Tensor:
        """Return what the blocks make of hidden states."""
        first, second, third, last = self.blocks
        with torch.autocast("cpu", dtype=torch.bfloat16):
            hidden = second(first(hidden))
            with torch.autocast("cpu", enabled=False):
                places = torch.arange(24.0)[:, None] @ torch.ones(1, 24) / 100
                hidden = third(hidden.float()) @ places.sin()
            with torch.no_grad():
                late = last(hidden)
                early = first(hidden)
        return last(hidden + late * early)


class Unused(Deep):
    """Leaves its last block out."""

    def through(self, hidden: Tensor) -> Tensor:
        """Return what the blocks make of hidden states."""
        for block in self.blocks[:3]:
            hidden = block(hidden)
        return hidden


class Uncaptured(Deep):
    """Has a graph break in a loop in which Dynamo cannot go on: it runs the loop eagerly."""

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Return the loss."""
        hidden = self.embed(tokens)
        for number, block in enumerate(self.blocks):
            hidden = block(hidden)
            if number == 1 and hidden.sum().item() > 1e9:
                hidden = hidden * 2
        return functional.cross_entropy(self.head(self.norm(hidden)).flatten(0, 1), targets.flatten())


class Adding(Deep):
    """Adds to what another stage has computed, in place."""

    def through(self, hidden: Tensor) -> Tensor:
        """Return what the blocks make of hidden states."""
        for block in self.blocks:
            hidden += block(hidden)
        return hidden


class Counting(Deep):
    """Counts its calls in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()))

    def through(self, hidden: Tensor) -> Tensor:
        """Return what the blocks make of hidden states."""
        self.count += 1
        return super().through(hidden)


MODELS: dict[str, type[Deep]] = {each.__name__: each for each in (Shifting, Checkpointed, Breaking, Mixed, Unused)}
REFUSED: dict[type[Deep], str] = {
    Uncaptured: "take the graph break out of the loop",
    Adding: "iadd at .* writes in place to what an earlier stage has computed",
    Counting: "writes in its forward to a buffer",
}


class Build:
    """What makes a model, the same on every rank."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(self) -> nn.Module:
        """Return a model of the class."""
        torch.manual_seed(0)
        model: nn.Module = globals()[self.name]()
        return model


@pytest.mark.parametrize("model", MODELS)
def test_two_ranks(model: str, two: RankPool, tmp_path: Path) -> None:
    loop = Loop(build=Build(model), clip=0.5 if model == "Unused" else None)
    plain = train_alone(loop, 2)
    traces = two.run(train_in_rounds, loop, placements(str(tmp_path))["nvme"])
    assert_same(joined(traces, plain), plain)


@pytest.mark.parametrize("model", REFUSED, ids=lambda model: model.__name__)
def test_what_is_refused(model: type[Deep], two: RankPool, tmp_path: Path) -> None:
    loop = Loop(build=Build(model.__name__), num_steps=1)
    start = time.monotonic()
    for outcome in two.outcomes(train_in_rounds, loop, placements(str(tmp_path))["resident"]):
        assert isinstance(outcome, Raised)
        assert outcome.kind in ("UnsupportedError", "RankError" if model is Uncaptured else "")
        assert re.search(REFUSED[model], outcome.message)
    assert time.monotonic() - start < 60.0
