"""transformers' Trainer: its options, optimizers, evaluation, checkpoints and callbacks, as with a plain model."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import zinf_compile
from tests.support.library_training import BUDGETS, Comparison, Optimize, Train, gpt2, llama, rows, run_example
from zinf_compile.ir.errors import UnsupportedError

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

_LOGGED = ("loss", "grad_norm", "learning_rate", "eval_loss")


def run_trainer(
    model: nn.Module, folder: Path, *, num_rows: int = 16, resume: Path | None = None, **options: Any
) -> tuple[list[float], Any]:
    """Train four steps; return what the Trainer logs, and the Trainer."""
    callbacks = options.pop("callbacks", [])
    given = {
        "per_device_train_batch_size": 2, "max_steps": 4, "learning_rate": 1e-2, "weight_decay": 0.1, "logging_steps": 1,
        "save_strategy": "no", "report_to": [], "use_cpu": True, "disable_tqdm": True, "dataloader_pin_memory": False,
    }  # fmt: skip
    trainer = transformers.Trainer(
        model=model,
        args=transformers.TrainingArguments(output_dir=str(folder), **{**given, **options}),
        train_dataset=rows(num_rows),
        eval_dataset=rows(6, seed=2),
        callbacks=callbacks,
    )
    trainer.remove_callback(transformers.PrinterCallback)
    trainer.train(resume_from_checkpoint=None if resume is None else str(resume))
    logged = [entry[key] for entry in trainer.state.log_history for key in _LOGGED if key in entry]
    assert logged
    return logged, trainer


def training(make: Any = llama, **options: Any) -> Train:
    """Return a training of a model in a Trainer with these options."""

    def train(optimize: Optimize, folder: Path) -> tuple[list[Any], nn.Module]:
        model = optimize(make())
        return run_trainer(model, folder, **options)[0], model

    return train


def in_eager_attention() -> nn.Module:
    """Return a Llama whose attention has the same bits traced and untraced, in bfloat16 too."""
    return llama(attn_implementation="eager")


@pytest.mark.parametrize(
    "options",
    [
        {"gradient_accumulation_steps": 2, "num_rows": 32, "max_grad_norm": 1.0},
        {"make": in_eager_attention, "bf16": True},
        {"gradient_checkpointing": True},
        {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}},
        {"lr_scheduler_type": "cosine", "warmup_steps": 2},
        {"label_smoothing_factor": 0.1},
        {"train_sampling_strategy": "group_by_length"},
        {"neftune_noise_alpha": 5.0},
        {"auto_find_batch_size": True},
        {"num_rows": 7, "max_steps": -1, "num_train_epochs": 1},
        {"make": gpt2},
    ],
    ids=[
        "accumulation", "bf16", "checkpointing", "reentrant", "cosine", "smoothing", "lengths", "neftune", "find_batch",
        "odd_batch", "tied",
    ],
)  # fmt: skip
def test_options(compare: Comparison, options: dict[str, Any]) -> None:
    compare(training(**options))


@pytest.mark.parametrize("optim", ["adamw_torch", "adamw_torch_fused", "adafactor", "sgd", "rmsprop", "adagrad"])
def test_optimizers(compare: Comparison, optim: str) -> None:
    compare(training(optim=optim))


@pytest.mark.parametrize(
    "optim",
    ["adamw_8bit", "ademamix", "lion_32bit", "paged_adamw_32bit", "paged_ademamix_8bit", "paged_lion_8bit", "rmsprop_bnb"],
)  # fmt: skip
def test_optimizers_of_bitsandbytes(compare: Comparison, optim: str) -> None:
    pytest.importorskip("bitsandbytes")
    compare(training(optim=optim, max_steps=2))


@pytest.mark.parametrize("is_compiled", [False, pytest.param(True, marks=pytest.mark.long)], ids=["eager", "compiled"])
@pytest.mark.parametrize("optim", ["adamw_torch_4bit", "adamw_torch_8bit"])
def test_optimizers_of_torchao(
    compare: Comparison, monkeypatch: pytest.MonkeyPatch, optim: str, is_compiled: bool
) -> None:
    """Each shape takes torchao seconds to compile, so most of the time its update runs op by op, on both sides."""
    adam = pytest.importorskip("torchao.optim.adam")
    if not is_compiled:
        kept = SimpleNamespace(**{**vars(torch), "compile": lambda function, **_: function})
        monkeypatch.setattr(adam, "torch", kept)
    compare(training(optim=optim, max_steps=2))


def test_evaluating_predicting_and_generating(compare: Comparison) -> None:
    def train(optimize: Optimize, folder: Path) -> tuple[list[Any], nn.Module]:
        model = optimize(llama())
        logged, trainer = run_trainer(model, folder, eval_strategy="steps", eval_steps=2)
        predicted = trainer.predict(rows(5, seed=4))
        model.eval()
        tokens = model.generate(torch.tensor([[5, 6, 7], [8, 9, 10]]), max_new_tokens=4, do_sample=False)
        return [*logged, predicted.metrics["test_loss"], predicted.predictions.tolist(), tokens.tolist()], model

    compare(train)


def test_resuming_from_a_checkpoint(compare: Comparison) -> None:
    def train(optimize: Optimize, folder: Path) -> tuple[list[Any], nn.Module]:
        saving = {"save_strategy": "steps", "save_steps": 2}
        whole, _ = run_trainer(optimize(llama()), folder, **saving)
        model = optimize(llama())
        resumed, _ = run_trainer(model, folder, resume=folder / "checkpoint-2", **saving)
        assert resumed == whole
        return resumed, model

    compare(train)


def test_the_best_model_is_loaded_when_training_stops_early(compare: Comparison) -> None:
    def train(optimize: Optimize, folder: Path) -> tuple[list[Any], nn.Module]:
        model = optimize(llama())
        logged, trainer = run_trainer(
            model, folder, eval_strategy="steps", eval_steps=1, save_strategy="steps", save_steps=1,
            load_best_model_at_end=True, metric_for_best_model="eval_loss", greater_is_better=False,
            callbacks=[transformers.EarlyStoppingCallback(1)],
        )  # fmt: skip
        assert trainer.state.global_step == 2
        assert trainer.state.best_model_checkpoint.endswith("checkpoint-1")
        return logged, model

    compare(train)


def test_saved_models_load_plainly(compare: Comparison) -> None:
    def train(optimize: Optimize, folder: Path) -> tuple[list[Any], nn.Module]:
        model = optimize(llama())
        logged, trainer = run_trainer(model, folder)
        trainer.save_model(str(folder / "final"))
        return logged, transformers.LlamaForCausalLM.from_pretrained(folder / "final")

    compare(train)


def test_converting_the_model_for_evaluation_is_refused(tmp_path: Path) -> None:
    model = zinf_compile.optimize(llama(), **BUDGETS, nvme=tmp_path)
    _, trainer = run_trainer(model, tmp_path, max_steps=1, bf16_full_eval=True)
    with pytest.raises(UnsupportedError, match="for the dtype of compute say compute_dtype"):
        trainer.evaluate()
    zinf_compile.close(model)


def test_by_default(compare: Comparison) -> None:
    compare.by_default(training(gradient_accumulation_steps=2, num_rows=32))


def test_the_example(tmp_path: Path) -> None:
    assert "on nvme" in run_example("trainer.py", tmp_path)
