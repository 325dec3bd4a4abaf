"""Tiny architectures of transformers with their batches, in the form in which the parity tests take them."""

import pytest
import torch
from torch import Tensor

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


def vit(num_layers: int = 2):
    torch.manual_seed(0)
    config = transformers.ViTConfig(
        hidden_size=32, num_hidden_layers=num_layers, num_attention_heads=2, intermediate_size=48, image_size=8,
        patch_size=4, num_labels=5, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
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


def deep_vit():
    """With two layers, the least memory in which its segments fit holds all of its parameters."""
    return vit(num_layers=4)


def bert_with_dropout():
    return bert(dropout=0.1)
