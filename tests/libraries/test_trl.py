"""TRL's SFT and DPO, the latter with a frozen reference, on optimized models."""

import random
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from tests.support.library_training import VOCAB, Comparison, Optimize, Train, llama

transformers = pytest.importorskip("transformers")
trl = pytest.importorskip("trl", reason="trl is not installed")
datasets = pytest.importorskip("datasets", reason="datasets is not installed")
peft = pytest.importorskip("peft")

_GIVEN: dict[str, Any] = {
    "per_device_train_batch_size": 2, "max_steps": 3, "learning_rate": 1e-2, "logging_steps": 1, "report_to": [],
    "use_cpu": True, "disable_tqdm": True, "dataloader_pin_memory": False, "save_strategy": "no", "bf16": False,
    "gradient_checkpointing": False,
}  # fmt: skip
_LOGGED = ("loss", "grad_norm", "rewards/margins", "logps/chosen")


def make_tokenizer() -> Any:
    tokenizers = pytest.importorskip("tokenizers")
    words = ["<pad>", "<s>", "</s>", "<unk>", *(f"w{index}" for index in range(VOCAB - 4))]
    model = tokenizers.models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="<unk>")
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )


def texts(seed: int, num_texts: int = 12) -> list[str]:
    drawn = random.Random(seed)
    return [" ".join(f"w{drawn.randrange(VOCAB - 4)}" for _ in range(8)) for _ in range(num_texts)]


def adapters() -> Any:
    return peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")


def run_trainer(trainer: Any) -> tuple[list[Any], nn.Module]:
    trainer.remove_callback(transformers.PrinterCallback)
    trainer.train()
    logged = [entry[key] for entry in trainer.state.log_history for key in _LOGGED if key in entry]
    assert logged
    return logged, trainer.model


def sft(*, is_adapted: bool = False, **options: Any) -> Train:
    def train(optimize: Optimize, folder: Path) -> tuple[list[Any], nn.Module]:
        trainer = trl.SFTTrainer(
            model=optimize(llama()),
            args=trl.SFTConfig(output_dir=str(folder), **{**_GIVEN, **options}),
            train_dataset=datasets.Dataset.from_dict({"text": texts(1)}),
            processing_class=make_tokenizer(),
            peft_config=adapters() if is_adapted else None,
        )
        return run_trainer(trainer)

    return train


def dpo(*, reference: str = "optimized", **options: Any) -> Train:
    """Return a training against a frozen reference, which is optimized or in memory, or against disabled adapters."""

    def train(optimize: Optimize, folder: Path) -> tuple[list[Any], nn.Module]:
        policy, frozen = optimize(llama()), None
        if reference != "adapters":
            frozen = llama().requires_grad_(False)
            frozen = optimize(frozen) if reference == "optimized" else frozen
        pairs = {"prompt": texts(1), "chosen": texts(2), "rejected": texts(3)}
        trainer = trl.DPOTrainer(
            model=policy,
            ref_model=frozen,
            args=trl.DPOConfig(output_dir=str(folder), **{**_GIVEN, **options}),
            train_dataset=datasets.Dataset.from_dict(pairs),
            processing_class=make_tokenizer(),
            peft_config=adapters() if reference == "adapters" else None,
        )
        return run_trainer(trainer)

    return train


@pytest.mark.parametrize(
    "options",
    [{"gradient_accumulation_steps": 2, "gradient_checkpointing": True}, {"is_adapted": True}],
    ids=["accumulation", "lora"],
)
def test_sft(compare: Comparison, options: dict[str, Any]) -> None:
    compare(sft(**options))


@pytest.mark.parametrize(
    "options",
    [{}, {"reference": "in memory"}, {"reference": "adapters"}, {"precompute_ref_log_probs": True}],
    ids=["optimized", "in_memory", "adapters", "precomputed"],
)
def test_dpo(compare: Comparison, options: dict[str, Any]) -> None:
    compare(dpo(**options))
