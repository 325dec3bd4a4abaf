"""`zinf train hf:FOLDER`: a causal language model of transformers, whole or with LoRA adapters, without a network."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import zinf_compile
from zinf_compile.cli.models import TEMPERATURE, Built
from zinf_compile.cli.text import Batch
from zinf_compile.frontend.verification import InComputeDtype
from zinf_compile.ir.errors import ConfigError
from zinf_compile.weights.weight_files import INDEX_FILE, SINGLE_FILE

_PREFIX = "hf:"


def parse_folder(word: str) -> Path:
    """Return the folder of ``hf:FOLDER``; ConfigError for anything else."""
    folder = Path(word.removeprefix(_PREFIX))
    if not word.startswith(_PREFIX) or not (folder / "config.json").is_file():
        raise ConfigError(
            f"{word} is no model; pass hf: and a folder with the config.json of a transformers model, such as hf:llama"
        )
    return folder


class TransformersModel:
    """A model that a folder's config.json describes, with the folder's safetensors, or with first values of its own.

    With a ``lora_rank`` it is frozen, and adapters of that rank beside its linear layers are trained. These are plain
    parameters in memory: they are added to the optimized model, so that its own may come from files a piece at a time.
    """

    def __init__(self, folder: Path, *, lora_rank: int | None, seq: int, vocab_size: int, seed: int) -> None:
        transformers = import_transformers()
        self._folder, self._lora_rank, self._seed = folder, lora_rank, seed
        self._has_weights = (folder / INDEX_FILE).is_file() or (folder / SINGLE_FILE).is_file()
        if not self._has_weights and (pickled := sorted(path.name for path in folder.glob("*.bin"))):
            raise ConfigError(f"the weights in '{folder}' are in {pickled[0]}; save them as safetensors first")
        try:
            self._config: Any = transformers.AutoConfig.from_pretrained(folder, local_files_only=True)
            self._make: Any = transformers.AutoModelForCausalLM
            model = self._with_adapters(self._on_meta())
        except (OSError, ValueError, ImportError) as error:
            reason = str(error).strip().partition("\n")[0]
            raise ConfigError(f"no causal language model can be made from '{folder}': {reason}") from error
        _check_sizes(self._config.get_text_config(), folder, seq=seq, vocab_size=vocab_size)
        sizes = [(parameter.numel(), parameter.requires_grad) for parameter in model.parameters()]
        self.num_trained = sum(size for size, trained in sizes if trained)
        self.num_frozen = sum(size for size, trained in sizes if not trained)

    @property
    def description(self) -> str:
        adapters = f", {self.num_trained:,} of them in adapters of rank {self._lora_rank}" if self._lora_rank else ""
        values = "weights" if self._has_weights else "config.json, and first values of its own"
        total = self.num_trained + self.num_frozen
        return f"a {self._config.model_type} of {total:,} parameters{adapters}, with the {values} in {self._folder}"

    def build_plain(self, compute_dtype: torch.dtype | None) -> Built:
        torch.manual_seed(self._seed)
        if self._has_weights:
            model = self._make.from_pretrained(self._folder, dtype=torch.float32, local_files_only=True)
        else:
            model = self._make.from_config(self._config, dtype=torch.float32)
        if self._lora_rank is None:
            return Built(model, model if compute_dtype is None else InComputeDtype(model, compute_dtype))
        if compute_dtype is not None:
            for parameter in model.parameters():
                parameter.data = parameter.data.to(compute_dtype)  # frozen: it needs no master copy
        model = self._with_adapters(model)
        return Built(model, model)

    def build_optimized(self, options: Mapping[str, Any]) -> Built:
        model = self._on_meta().requires_grad_(self._lora_rank is None)
        torch.manual_seed(self._seed)
        zinf_compile.optimize(model, init=self._folder if self._has_weights else "reset", **options)
        model = self._with_adapters(model)
        return Built(model, model)

    def loss(self, forward: nn.Module, batch: Batch) -> Tensor:
        # Its own loss moves the labels on by one, so the last of the targets is not asked for.
        loss: Tensor = forward(input_ids=batch.tokens, labels=batch.tokens, use_cache=False).loss
        return loss

    def sample(self, built: Built, prompt: Tensor, num_new: int) -> Tensor:
        torch.manual_seed(self._seed)
        model: Any = built.trunk
        # Eagerly: every length would be a graph of its own.
        with torch.compiler.set_stance("force_eager"):
            tokens: Tensor = model.eval().generate(
                input_ids=prompt,
                attention_mask=torch.ones_like(prompt),
                max_new_tokens=num_new,
                do_sample=True,
                temperature=TEMPERATURE,
            )
        return tokens

    def _on_meta(self) -> nn.Module:
        with torch.device("meta"):
            model: nn.Module = self._make.from_config(self._config, dtype=torch.float32)
        return model.train()

    def _with_adapters(self, model: nn.Module) -> nn.Module:
        if self._lora_rank is None:
            return model.train()
        peft = _import_peft()
        torch.manual_seed(self._seed)  # whatever making the model has drawn
        adapters = peft.LoraConfig(
            r=self._lora_rank, lora_alpha=2 * self._lora_rank, target_modules="all-linear", task_type="CAUSAL_LM"
        )
        adapted: nn.Module = peft.get_peft_model(model, adapters)
        return adapted.train()


def _check_sizes(config: Any, folder: Path, *, seq: int, vocab_size: int) -> None:
    longest = getattr(config, "max_position_embeddings", None)
    if longest is not None and seq > longest:
        raise ConfigError(f"--seq {seq} is longer than the {longest} positions of the model in '{folder}'; lower --seq")
    if vocab_size > config.vocab_size:
        raise ConfigError(
            f"the text has {vocab_size} kinds of tokens, the model in '{folder}' has {config.vocab_size}; pass the model's "
            "own --tokenizer"
        )


def import_transformers() -> Any:
    """Return the transformers library; ConfigError where it is not installed."""
    try:
        import transformers
    except ImportError:
        raise ConfigError("hf: needs the transformers library: pip install zinf_compile[hf]") from None
    return transformers


def _import_peft() -> Any:
    try:
        import peft
    except ImportError:
        raise ConfigError("--lora needs the peft library: pip install zinf_compile[lora]") from None
    return peft
