"""Tiny architectures of transformers: five AdamW steps are bitwise equal to plain PyTorch."""

import pytest
import torch

import zinf_compile
from tests.support.transformer_models import (
    VOCAB,
    bert,
    bert_with_dropout,
    deep_vit,
    gpt2,
    llama,
    mixtral,
    qwen3,
    t5,
    transformers,
    vit,
)
from zinf_compile.runtime.native.compiled import find_compiler


@pytest.mark.parametrize(
    ("workload", "way"),
    [
        (llama, "captured"),
        *(pytest.param(each, "captured", marks=pytest.mark.long) for each in (mixtral, gpt2, qwen3, bert, t5, vit)),
        *((workload, "eager") for workload in (llama, gpt2, qwen3, mixtral, bert, t5, vit)),
        *(
            pytest.param(each, "inductor", marks=pytest.mark.long)
            for each in (llama, gpt2, qwen3, mixtral, bert, t5, deep_vit)
        ),
    ],
    indirect=["way"],
)
def test_bitwise(parity, workload, way):
    parity.check(workload, "nvme", **way)


@pytest.mark.parametrize(
    ("workload", "placement"),
    [(llama, "mixed"), *(pytest.param(*each, marks=pytest.mark.long) for each in ((mixtral, "host"), (t5, "mixed")))],
)
def test_bitwise_in_other_placements(parity, workload, placement):
    """A placement changes transfers but not the graph, so a few different models are enough; test_models.py has six more."""
    parity.check(workload, placement, captured=True)


@pytest.mark.parametrize("placement", ["host", "mixed"])
@pytest.mark.parametrize("workload", [llama, gpt2, qwen3, mixtral, bert, t5, vit])
def test_bitwise_in_other_placements_eagerly(parity, workload, placement):
    parity.check(workload, placement, captured=False)


@pytest.mark.parametrize("way", ["captured", "eager", pytest.param("inductor", marks=pytest.mark.long)], indirect=True)
def test_dropout(parity, way):
    """The same seed drops the same elements, in forward and in what backward recomputes."""
    parity.check(bert_with_dropout, "nvme", **way)
    dropped = parity.reference(bert_with_dropout, captured=False).losses
    assert not torch.equal(dropped[0], parity.reference(bert, captured=False).losses[0])


def test_class_stays(parity):
    """Code that looks a model up by its class still finds it."""
    model, _ = parity.optimized(llama, "nvme", captured=False)
    assert isinstance(model, transformers.LlamaForCausalLM)
    assert (type(model).__name__, type(model).__module__) == (
        "LlamaForCausalLM",
        transformers.LlamaForCausalLM.__module__,
    )
    assert model.loss_type == transformers.LlamaForCausalLM(model.config).loss_type


@pytest.mark.parametrize("workload", [llama, pytest.param(vit, marks=pytest.mark.long)])
def test_tiles_give_the_same_to_rounding(parity, workload):
    """Gather every matrix that allows it in three tiles, in float64; SGD does not amplify differences."""

    def train(model, batches):
        doubled = [
            {name: each.double() if each.is_floating_point() else each for name, each in batch.items()}
            for batch in batches
        ]
        return parity.train(
            model,
            doubled,
            make_optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        )

    plain, batches = workload()
    expected = train(plain.double(), batches)
    model = workload()[0].double()
    tiles = {name: 3 for name, each in model.named_parameters() if each.dim() == 2 and each.shape[0] >= 32}
    parity.optimize(model, device_memory="8MiB", host_memory="64MiB", tiles=tiles)
    ours = train(model, batches)
    plans = zinf_compile.report(model).plans
    assert {item.tile_of for plan in plans for item in plan.placements} - {None} == tiles.keys()
    for mine, theirs in zip(ours.losses, expected.losses, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-10)
    for mine, theirs in zip(ours.parameters, expected.parameters, strict=True):
        for name in theirs:
            torch.testing.assert_close(mine[name], theirs[name], rtol=1e-10, atol=1e-10)


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.skipif(find_compiler() is None, reason="there is no C++ compiler on the PATH")
def test_generating_captures_a_bounded_number_of_times(parity):
    """The prompt and the next token: each once for its first shape, and once for all others."""
    plain, _ = llama()
    model = parity.optimize(llama()[0], device_memory="64MiB", host_memory="64MiB", compute="inductor")
    num_captures = []
    for length in (3, 5, 6, 9):
        prompt = torch.randint(4, VOCAB, (1, length), generator=torch.Generator().manual_seed(length))
        options = {"max_new_tokens": 3, "do_sample": False, "pad_token_id": 0, "use_cache": True}
        assert torch.equal(model.generate(prompt, **options), plain.generate(prompt, **options))
        num_captures.append(len(zinf_compile.report(model).plans))
    assert num_captures[-1] <= 4
    assert num_captures[1:] == [num_captures[-1]] * 3
    assert zinf_compile.report(model).num_eager_gathers == 0
