"""Tiny architectures of transformers: five AdamW steps are bitwise equal to plain PyTorch."""

import pytest
import torch
from torch import Tensor

import zinf_compile

transformers = pytest.importorskip("transformers")

STEPS = 5
VOCAB = 96
SHAPE = {"vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
POSITIONS = {"max_position_embeddings": 16}


def token_batches(**extra: Tensor) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    batches = []
    for _ in range(STEPS):
        tokens = torch.randint(4, VOCAB, (2, 8), generator=generator)
        batches.append({"input_ids": tokens, "labels": tokens.clone(), **extra})
    return batches


def llama():
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        **SHAPE, **POSITIONS, intermediate_size=48, num_key_value_heads=1, use_cache=False
    )
    return transformers.LlamaForCausalLM(config), token_batches()


def gpt2():
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=VOCAB, n_embd=32, n_layer=2, n_head=2, n_positions=16, use_cache=False,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config), token_batches()


def qwen3():
    torch.manual_seed(0)
    config = transformers.Qwen3Config(
        **SHAPE, **POSITIONS, intermediate_size=48, num_key_value_heads=1, head_dim=16, use_cache=False
    )
    return transformers.Qwen3ForCausalLM(config), token_batches()


def mixtral():
    torch.manual_seed(0)
    config = transformers.MixtralConfig(
        **SHAPE, **POSITIONS, intermediate_size=32, num_key_value_heads=1, num_local_experts=4, use_cache=False,
        output_router_logits=True,
    )  # fmt: skip
    return transformers.MixtralForCausalLM(config), token_batches()


def bert(dropout: float = 0.0):
    torch.manual_seed(0)
    config = transformers.BertConfig(
        **SHAPE, **POSITIONS, intermediate_size=48, hidden_dropout_prob=dropout, attention_probs_dropout_prob=dropout
    )
    return transformers.BertForMaskedLM(config), token_batches(
        attention_mask=torch.tensor([[1] * 8, [1] * 5 + [0] * 3])
    )


def t5():
    torch.manual_seed(0)
    config = transformers.T5Config(
        vocab_size=VOCAB, d_model=32, d_kv=16, d_ff=48, num_layers=2, num_decoder_layers=1, num_heads=2,
        dropout_rate=0.0, use_cache=False, decoder_start_token_id=0, pad_token_id=0,
    )  # fmt: skip
    return transformers.T5ForConditionalGeneration(config), token_batches()


def vit():
    torch.manual_seed(0)
    config = transformers.ViTConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=48, image_size=8, patch_size=4,
        num_labels=5, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    generator = torch.Generator().manual_seed(1)
    batches = [
        {
            "pixel_values": torch.randn(2, 3, 8, 8, generator=generator),
            "labels": torch.randint(5, (2,), generator=generator),
        }
        for _ in range(STEPS)
    ]
    return transformers.ViTForImageClassification(config), batches


def bert_with_dropout():
    return bert(dropout=0.1)


@pytest.mark.parametrize(
    ("workload", "way"),
    [
        *((workload, "captured") for workload in (llama, mixtral, bert, t5)),
        *(pytest.param(workload, "captured", marks=pytest.mark.long) for workload in (gpt2, qwen3, vit)),
        *((workload, "eager") for workload in (llama, gpt2, qwen3, mixtral, bert, t5, vit)),
        (t5, "inductor"),  # test_by_default.py compiles the same segments
        *(pytest.param(each, "inductor", marks=pytest.mark.long) for each in (llama, gpt2, qwen3, mixtral, bert, vit)),
    ],
    indirect=["way"],
)
def test_bitwise(parity, workload, way):
    parity.check(workload, "nvme", **way)


@pytest.mark.parametrize(("workload", "placement"), [(mixtral, "host"), (llama, "mixed"), (t5, "mixed")])
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


@pytest.mark.parametrize("workload", [llama, vit])
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
