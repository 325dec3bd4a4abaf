"""The defaults: every architecture computes in compiled segments, and matches plain PyTorch to rounding.

Each model trains three steps of SGD in float32. A segment that is not compiled is in ``report``, and fails the test.

Inductor fuses ops and reorders sums, so losses are not bitwise equal. A wrong stride, a lost gradient or a stale value
would be off by percents.
"""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

import zinf_compile
from tests.support.small_models import conv_net, early_views, gpt, gpt_tied, mlp, recurrent, used_twice
from tests.support.transformer_models import bert, mixtral, qwen3, t5, vit
from zinf_compile.runtime.native.compiled import find_compiler

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.skipif(find_compiler() is None, reason="there is no C++ compiler on the PATH")

STEPS = 3
ROUNDING = 1e-5
BUDGETS = {"compute": "inductor", "device_memory": "64MiB", "host_memory": "64MiB"}
VOCAB = 96
SHAPE = {"vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4}


def make_sgd(model: nn.Module) -> torch.optim.Optimizer:
    """Return SGD: it does not amplify differences, as optimizers do that divide by small gradients."""
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def check(parity, workload, *, fallbacks: tuple[str, ...] = ()) -> None:
    """Train a workload with default options, and compare; each of ``fallbacks`` is part of a fallback in the report."""
    torch.manual_seed(0)
    plain, batches = parity.make(workload, plain=True)
    expected = parity.train(plain, batches[:STEPS], make_optimizer=make_sgd)
    torch.manual_seed(0)
    model = parity.optimize(parity.make(workload)[0], **BUDGETS)
    ours = parity.train(model, batches[:STEPS], make_optimizer=make_sgd)
    for mine, theirs in zip(ours.losses, expected.losses, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=ROUNDING, atol=0.0)
    report = zinf_compile.report(model)
    assert len(report.fallbacks) == len(fallbacks), report.fallbacks
    for sentence, words in zip(report.fallbacks, fallbacks, strict=True):
        assert words in sentence
        assert sentence in str(report)
    for plan in report.plans:  # empty where nothing is captured
        assert any(op.op == "zinf.run_segment.default" for op in plan.request.captured[0].ops), plan.request.name


def tokens(**extra: Tensor) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    drawn = [torch.randint(4, VOCAB, (2, 8), generator=generator) for _ in range(STEPS)]
    return [{"input_ids": each, "labels": each.clone(), **extra} for each in drawn]


def floats(*shape: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(shape, generator=generator) for _ in range(STEPS)]


def images(side: int) -> list[dict[str, Tensor]]:
    return [{"pixel_values": each, "labels": torch.tensor([0, 3])} for each in floats(2, 3, side, side)]


def llama(num_key_value_heads: int = 2):
    """Fewer key heads than query heads, default attention, and a key-value cache that is not turned off."""
    config = transformers.LlamaConfig(**SHAPE, intermediate_size=48, num_key_value_heads=num_key_value_heads)
    assert config.use_cache
    return transformers.LlamaForCausalLM(config), tokens()


def llama_without_groups():
    return llama(num_key_value_heads=4)


def gpt2():
    """Tied embeddings, and one product for queries, keys and values, which are strided views of it."""
    config = transformers.GPT2Config(vocab_size=VOCAB, n_embd=32, n_layer=1, n_head=4, n_positions=16)
    return transformers.GPT2LMHeadModel(config), tokens()


def mistral():
    """Attention with a sliding window of four tokens."""
    config = transformers.MistralConfig(**SHAPE, intermediate_size=48, num_key_value_heads=2, sliding_window=4)
    return transformers.MistralForCausalLM(config), tokens()


def gemma2():
    """A layer with a window of four tokens and one with full attention; scores and logits are capped."""
    config = transformers.Gemma2Config(
        **{**SHAPE, "num_hidden_layers": 2}, intermediate_size=48, num_key_value_heads=2, head_dim=8, sliding_window=4
    )
    return transformers.Gemma2ForCausalLM(config), tokens()


def phi3():
    config = transformers.Phi3Config(**SHAPE, intermediate_size=48, num_key_value_heads=2, pad_token_id=0)
    return transformers.Phi3ForCausalLM(config), tokens()


def gpt_neox():
    """Attention and MLP in parallel; rotary embedding of a quarter of each head."""
    config = transformers.GPTNeoXConfig(**SHAPE, intermediate_size=48)
    return transformers.GPTNeoXForCausalLM(config), tokens()


def bloom():
    """Biases by distance (ALiBi) in place of position embeddings."""
    config = transformers.BloomConfig(vocab_size=VOCAB, hidden_size=32, n_layer=1, n_head=4)
    return transformers.BloomForCausalLM(config), tokens()


def qwen2_moe():
    config = transformers.Qwen2MoeConfig(
        **SHAPE, intermediate_size=48, num_key_value_heads=2, num_experts=4, num_experts_per_tok=2,
        moe_intermediate_size=16, shared_expert_intermediate_size=48,
    )  # fmt: skip
    return transformers.Qwen2MoeForCausalLM(config), tokens()


def albert():
    """One layer that is applied twice."""
    config = transformers.AlbertConfig(
        **{**SHAPE, "num_hidden_layers": 2}, embedding_size=16, intermediate_size=48, max_position_embeddings=16
    )
    return transformers.AlbertForMaskedLM(config), tokens(attention_mask=torch.tensor([[1] * 8, [1] * 5 + [0] * 3]))


def bart():
    config = transformers.BartConfig(
        vocab_size=VOCAB, d_model=32, encoder_layers=1, decoder_layers=1, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=48, decoder_ffn_dim=48, max_position_embeddings=16,
    )  # fmt: skip
    return transformers.BartForConditionalGeneration(config), tokens()


def whisper():
    """Convolutions over audio, then an encoder and a decoder."""
    config = transformers.WhisperConfig(
        vocab_size=VOCAB, d_model=32, encoder_layers=1, decoder_layers=1, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=48, decoder_ffn_dim=48, max_source_positions=8,
        max_target_positions=16, num_mel_bins=8, pad_token_id=0, decoder_start_token_id=1,
    )  # fmt: skip
    drawn = [
        {"input_features": features, "labels": each["labels"]}
        for features, each in zip(floats(2, 8, 16), tokens(), strict=True)
    ]
    return transformers.WhisperForConditionalGeneration(config), drawn


def convnext():
    config = transformers.ConvNextConfig(
        num_stages=2, hidden_sizes=[16, 32], depths=[1, 1], image_size=16, patch_size=2, num_labels=5
    )
    return transformers.ConvNextForImageClassification(config), images(16)


def dinov2():
    config = transformers.Dinov2Config(
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=4,
        mlp_ratio=2,
        image_size=8,
        patch_size=4,
        num_labels=5,
    )
    return transformers.Dinov2ForImageClassification(config), images(8)


def clip():
    """Two towers, and a loss between them."""
    tower = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 48}
    config = transformers.CLIPConfig(
        text_config={**tower, "vocab_size": VOCAB, "max_position_embeddings": 16, "eos_token_id": VOCAB - 1},
        vision_config={**tower, "image_size": 8, "patch_size": 4},
        projection_dim=16,
    )
    drawn = [
        {"input_ids": each["input_ids"], "pixel_values": image["pixel_values"], "return_loss": torch.tensor(True)}
        for each, image in zip(tokens(), images(8), strict=True)
    ]
    return transformers.CLIPModel(config), drawn


def mamba():
    config = transformers.MambaConfig(
        vocab_size=VOCAB, hidden_size=32, state_size=4, num_hidden_layers=1, time_step_rank=4
    )
    return transformers.MambaForCausalLM(config), tokens()


FEW = [recurrent, llama]
MORE = [
    gpt, gpt_tied, mlp, used_twice, early_views, mistral, gemma2, phi3, gpt_neox, bloom, qwen2_moe, albert, bart, whisper,
    convnext, dinov2, clip, mamba, llama_without_groups, vit, conv_net,
]  # fmt: skip
COMPILED_ELSEWHERE = [t5, gpt2, qwen3, bert, mixtral]  # in test_transformers.py, for five steps of AdamW


@pytest.mark.parametrize("workload", [*FEW, *(pytest.param(workload, marks=pytest.mark.long) for workload in MORE)])
def test_every_architecture(parity, workload):
    check(parity, workload)


@pytest.fixture
def lying_op() -> Iterator[None]:
    """Register an op whose fake kernel promises a contiguous result, but whose real kernel returns transposed strides."""
    library = torch.library.Library("zinf_tests", "DEF")
    library.define("lying(Tensor x) -> Tensor")
    library.impl("lying", lambda x: (x * 2).mT.contiguous().mT, "CompositeExplicitAutograd")
    torch.library.register_fake("zinf_tests::lying", lambda x: torch.empty_like(x), lib=library)
    torch.library.register_autograd(
        "zinf_tests::lying", lambda context, grad: torch.ops.zinf_tests.lying(grad), lib=library
    )
    yield
    library._destroy()


class Lying(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.ops.zinf_tests.lying(torch.tanh(layer(x)))
            x = torch.sin(x) * 1.5 + torch.cos(x)
        return x.square().mean()


@pytest.mark.long
@pytest.mark.usefixtures("lying_op")
def test_an_op_whose_fake_kernel_lies(parity):
    def workload():
        torch.manual_seed(0)
        generator = torch.Generator().manual_seed(1)
        return Lying(), [{"x": torch.randn(4, 16, generator=generator)} for _ in range(STEPS)]

    said = "whose strides are (1, 4), and not (16, 1): the fake kernel of the op that made it says otherwise"
    check(parity, workload, fallbacks=(said,) * 3)
