"""Models of `zinf train`: the interface, and the GPT of the model file."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

import zinf_compile
from zinf_compile.cli.text import Batch
from zinf_compile.frontend.verification import InComputeDtype

TEMPERATURE = 0.8  # for samples: at 1.0 a model trained for minutes rambles


class Built(NamedTuple):
    """A built model: ``trunk`` is trained, saved and reported on; ``forward`` is called."""

    trunk: nn.Module
    forward: nn.Module


class Subject(Protocol):
    """A kind of model, before it is built."""

    @property
    def description(self) -> str: ...
    @property
    def num_trained(self) -> int: ...
    @property
    def num_frozen(self) -> int: ...
    def build_plain(self, compute_dtype: torch.dtype | None) -> Built:
        """The model in memory."""

    def build_optimized(self, options: Mapping[str, Any]) -> Built:
        """The model within budgets; ``options`` are those of ``optimize``."""

    def loss(self, forward: nn.Module, batch: Batch) -> Tensor:
        """Mean loss in nats per token."""

    def sample(self, built: Built, prompt: Tensor, num_new: int) -> Tensor:
        """The prompt [1, n] and what follows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExampleGPT:
    """The GPT of a model file like examples/gpt.py."""

    example: ModuleType
    config: Any
    seed: int

    @property
    def description(self) -> str:
        config = self.config
        return (
            f"a GPT of {self.num_trained:,} parameters, {config.layers} layers, hidden {config.hidden}, "
            f"{config.heads} heads, vocabulary {config.vocab_size}"
        )

    @property
    def num_trained(self) -> int:
        num_parameters: int = self.example.num_parameters(self.config)
        return num_parameters

    @property
    def num_frozen(self) -> int:
        return 0

    def build_plain(self, compute_dtype: torch.dtype | None) -> Built:
        model = self.example.GPT(self.config, seed=self.seed)
        return Built(model, model if compute_dtype is None else InComputeDtype(model, compute_dtype))

    def build_optimized(self, options: Mapping[str, Any]) -> Built:
        model = zinf_compile.optimize(self.example.GPT(self.config, seed=self.seed), **options)
        return Built(model, model)

    def loss(self, forward: nn.Module, batch: Batch) -> Tensor:
        loss: Tensor = forward(batch.tokens, batch.targets)
        return loss

    def sample(self, built: Built, prompt: Tensor, num_new: int) -> Tensor:
        generator = torch.Generator().manual_seed(self.seed)
        tokens: Tensor = self.example.generate(
            built.forward, prompt, num_new, temperature=TEMPERATURE, generator=generator
        )
        return tokens
