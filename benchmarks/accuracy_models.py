"""The models of ``plan_accuracy.py``: the example GPT, plain modules, and transformers built from configs.

Each is large enough that a step takes a few tenths of a second on two cores, and small enough that its states fit in RAM.
"""

import importlib.util
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCAB = 4096
SEQ = 256
_EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
_POSITIONS = {"vocab_size": VOCAB, "max_position_embeddings": SEQ, "use_cache": False}
_WIDE = {"hidden_size": 512, "num_hidden_layers": 8, "num_attention_heads": 8}
_GATED = {**_POSITIONS, **_WIDE, "intermediate_size": 1536, "num_key_value_heads": 4, "tie_word_embeddings": False}


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A model, the inputs of one step, and how to compute the loss from its output."""

    model: nn.Module
    batch: dict[str, Tensor]

    def loss(self) -> Tensor:
        """Return the loss of the batch."""
        result = self.model(**self.batch)
        loss: Tensor = result if isinstance(result, Tensor) else result.loss
        return loss


class MLP(nn.Module):
    """Equal layers with ReLU; ``model(x, target)`` is the mean squared error."""

    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        for layer in self.layers:
            x = F.relu(layer(x))
        return F.mse_loss(x, target)


class ResidualBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.first_norm = nn.GroupNorm(8, width)
        self.second = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.second_norm = nn.GroupNorm(8, width)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.first_norm(self.first(x)))
        return F.relu(x + self.second_norm(self.second(y)))


class ConvNet(nn.Module):
    """Residual blocks in stages of half the resolution and twice the width; ``model(x, target)`` is the cross entropy."""

    def __init__(self, widths: tuple[int, ...], blocks: int, classes: int) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, widths[0], 3, padding=1)
        self.stages = nn.ModuleList(
            nn.Sequential(
                nn.Conv2d(before, width, 3, stride=2, padding=1), *(ResidualBlock(width) for _ in range(blocks))
            )
            for before, width in zip((widths[0], *widths), widths, strict=False)
        )
        self.head = nn.Linear(widths[-1], classes)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        x = self.stem(x)
        for stage in self.stages:
            x = stage(x)
        return F.cross_entropy(self.head(x.mean((2, 3))), target)


def _gpt(layers: int, hidden: int, batch: int) -> Workload:
    gpt = load_gpt()
    config = gpt.GPTConfig(vocab_size=VOCAB, layers=layers, hidden=hidden, heads=hidden // gpt.HEAD_WIDTH, seq=SEQ)
    tokens = torch.randint(VOCAB, (batch, SEQ + 1))
    return Workload(
        model=gpt.GPT(config),
        batch={"tokens": tokens[:, :-1].contiguous(), "targets": tokens[:, 1:].contiguous()},
    )


def load_gpt() -> ModuleType:
    """Return the module of the example GPT."""
    spec = importlib.util.spec_from_file_location("gpt", _EXAMPLES / "gpt.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["gpt"] = module
    spec.loader.exec_module(module)
    return module


def _mlp() -> Workload:
    return Workload(model=MLP(8, 2048), batch={"x": torch.randn(512, 2048), "target": torch.randn(512, 2048)})


def _conv() -> Workload:
    batch = {"x": torch.randn(8, 3, 64, 64), "target": torch.randint(100, (8,))}
    return Workload(model=ConvNet((64, 128, 256, 512), 2, 100), batch=batch)


def _language_model(config: str, model: str, **options: Any) -> Workload:
    """Return a language model from transformers, with its input ids as labels."""
    import transformers

    tokens = torch.randint(4, VOCAB, (2, SEQ))
    return Workload(
        model=getattr(transformers, model)(getattr(transformers, config)(**options)),
        batch={"input_ids": tokens, "labels": tokens.clone()},
    )


def _vit() -> Workload:
    import transformers

    config = transformers.ViTConfig(**_WIDE, intermediate_size=2048, image_size=128, patch_size=8, num_labels=100)
    batch = {"pixel_values": torch.randn(2, 3, 128, 128), "labels": torch.randint(100, (2,))}
    return Workload(model=transformers.ViTForImageClassification(config), batch=batch)


@dataclass(frozen=True, kw_only=True)
class Entry:
    """How a model is built, and the dtype it computes in; None for the dtype of its parameters, float32."""

    build: Callable[[], Workload]
    compute_dtype: str | None = "bfloat16"


_GPT2 = {"vocab_size": VOCAB, "n_embd": 512, "n_layer": 8, "n_head": 8, "n_positions": SEQ, "use_cache": False}
_EXPERTS = {**_GATED, "num_hidden_layers": 4, "intermediate_size": 1024, "num_local_experts": 4}
_BERT = {**_WIDE, "vocab_size": VOCAB, "max_position_embeddings": SEQ, "intermediate_size": 2048}
_T5 = {"vocab_size": VOCAB, "d_model": 512, "d_kv": 64, "d_ff": 2048, "num_layers": 4, "num_heads": 8}
_OPT = {**_POSITIONS, **_WIDE, "ffn_dim": 2048, "word_embed_proj_dim": 512}

# Dropout keeps the default of each config.
MODELS: dict[str, Entry] = {
    "gpt-small": Entry(build=lambda: _gpt(6, 512, 2), compute_dtype=None),
    "gpt-deep": Entry(build=lambda: _gpt(16, 512, 2)),
    "gpt-wide": Entry(build=lambda: _gpt(4, 1280, 2)),
    "mlp": Entry(build=_mlp, compute_dtype=None),
    "conv": Entry(build=_conv, compute_dtype=None),
    "llama": Entry(build=lambda: _language_model("LlamaConfig", "LlamaForCausalLM", **_GATED)),
    "gpt2": Entry(build=lambda: _language_model("GPT2Config", "GPT2LMHeadModel", **_GPT2)),
    "qwen3": Entry(build=lambda: _language_model("Qwen3Config", "Qwen3ForCausalLM", **_GATED, head_dim=64)),
    "gemma": Entry(build=lambda: _language_model("GemmaConfig", "GemmaForCausalLM", **_GATED, head_dim=64)),
    "mixtral": Entry(build=lambda: _language_model("MixtralConfig", "MixtralForCausalLM", **_EXPERTS)),
    "bert": Entry(build=lambda: _language_model("BertConfig", "BertForMaskedLM", **_BERT)),
    "t5": Entry(
        build=lambda: _language_model(
            "T5Config", "T5ForConditionalGeneration", **_T5, use_cache=False, decoder_start_token_id=0, pad_token_id=0
        )
    ),
    "vit": Entry(build=_vit, compute_dtype=None),
    "opt": Entry(build=lambda: _language_model("OPTConfig", "OPTForCausalLM", **_OPT), compute_dtype=None),
}
