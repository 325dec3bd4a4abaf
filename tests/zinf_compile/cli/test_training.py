"""The loop of `zinf train`, compared with a hand-written one."""

import pytest
import torch
from torch import Tensor, nn

from zinf_compile.cli.optimizers import find_optimizer, make_optimizer, measure_state
from zinf_compile.cli.text import Batch, ByteVocabulary, TokenStream
from zinf_compile.cli.training import Schedule, Training
from zinf_compile.ir.errors import UnsupportedError

STREAM = TokenStream(ByteVocabulary().encode(bytes(range(256))), ByteVocabulary(), "all bytes")


def _bigrams() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(256, 8), nn.Linear(8, 256))


def _loss(model: nn.Module, batch: Batch) -> Tensor:
    return nn.functional.cross_entropy(model(batch.tokens).flatten(0, 1), batch.targets.flatten())


def test_micro_batches_and_clipping_are_those_of_a_loop_by_hand() -> None:
    model = _bigrams()
    optimizer = make_optimizer(torch.optim.AdamW, model.parameters(), 0.01)
    training = Training(
        model, optimizer, STREAM.batches(batch=2, seq=4, seed=0), Schedule(steps=3, accumulate=4, clip=0.1)
    )
    results = list(training.run(lambda batch: _loss(model, batch)))

    by_hand, batches = _bigrams(), STREAM.batches(batch=2, seq=4, seed=0)
    optimizer = torch.optim.AdamW(by_hand.parameters(), lr=0.01, fused=True)
    losses = []
    for rate in (group["lr"] for group in [{"lr": 0.01}, {"lr": 0.00775}, {"lr": 0.00325}]):
        optimizer.param_groups[0]["lr"] = rate
        total = 0.0
        for _ in range(4):
            loss = _loss(by_hand, next(batches)) / 4
            loss.backward()
            total += loss.item()
        norm = torch.nn.utils.clip_grad_norm_(by_hand.parameters(), 0.1)
        assert norm > 0.1
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    assert [result.loss for result in results] == losses
    assert [result.step for result in results] == [1, 2, 3]
    for ours, theirs in zip(model.parameters(), by_hand.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_batches_go_on_from_a_position() -> None:
    batches = STREAM.batches(batch=2, seq=4, seed=0)
    next(batches)
    position = batches.position
    expected = next(batches)
    again = STREAM.batches(batch=2, seq=4, seed=1)
    again.position = position
    assert torch.equal(next(again).tokens, expected.tokens)


@pytest.mark.parametrize(
    ("name", "nbytes"), [("AdamW", 8), ("adam", 8), ("SGD", 0), ("adafactor", 0), ("MUON", 4), ("rmsprop", 4)]
)
def test_state_of_optimizers(name: str, nbytes: int) -> None:
    kind = find_optimizer(name, 0.01)
    assert kind.__name__.lower() == name.lower()
    assert measure_state(kind, 0.01) == nbytes


@pytest.mark.parametrize("name", ["lbfgs", "sparseadam"])
def test_optimizers_that_cannot_be_streamed_are_refused(name: str) -> None:
    with pytest.raises(UnsupportedError, match="is not supported by zinf_compile"):
        find_optimizer(name, 0.01)
