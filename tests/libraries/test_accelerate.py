"""accelerate's loop on an optimized model: prepare, accumulate, clip, save and load."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.library_training import Comparison, Optimize, Train, llama, rows, run_example, weights

accelerate = pytest.importorskip("accelerate")


def training(
    *, precision: str = "no", is_optimized_last: bool = False, resume: bool = False, clip: str = "norm", **of_model: Any
) -> Train:
    """Return a training of four steps of two micro-batches; ``resume``: and once more, from the state after them."""

    def train(optimize: Optimize, folder: Path) -> tuple[list[Any], nn.Module]:
        accelerate.state.AcceleratorState._reset_state(True)
        accelerate.state.GradientState._reset_state()
        accelerator = accelerate.Accelerator(cpu=True, mixed_precision=precision, gradient_accumulation_steps=2)
        model = llama(**of_model) if is_optimized_last else optimize(llama(**of_model))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 8)
        shuffled = torch.Generator().manual_seed(7)
        batches = torch.utils.data.DataLoader(rows(), batch_size=2, shuffle=True, generator=shuffled)
        model, optimizer, batches, schedule = accelerator.prepare(model, optimizer, batches, schedule)
        if is_optimized_last:
            optimize(model)
        numbers: list[Any] = []

        def run_epoch() -> None:
            for batch in batches:
                with accelerator.accumulate(model):
                    loss = model(**batch).loss
                    accelerator.backward(loss)
                    if accelerator.sync_gradients and clip == "norm":
                        numbers.append(accelerator.clip_grad_norm_(model.parameters(), 1.0).item())
                    elif accelerator.sync_gradients:
                        accelerator.clip_grad_value_(model.parameters(), 0.01)
                    optimizer.step()
                    schedule.step()
                    optimizer.zero_grad()
                numbers.extend((loss.item(), schedule.get_last_lr()[0]))

        run_epoch()
        if resume:
            accelerator.save_state(str(folder / "state"))
            saved = weights(model)
            run_epoch()
            accelerator.load_state(str(folder / "state"))
            assert all(torch.equal(value, saved[name]) for name, value in weights(model).items())
            run_epoch()
        inner = accelerator.unwrap_model(model)
        inner.save_pretrained(folder / "final", state_dict=accelerator.get_state_dict(model))
        for name, parameter in type(inner).from_pretrained(folder / "final").named_parameters():
            assert torch.equal(parameter, inner.get_parameter(name)), name
        return numbers, inner

    return train


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"clip": "value"},
        {"precision": "bf16", "attn_implementation": "eager"},
        {"is_optimized_last": True},
        {"resume": True},
    ],
    ids=["norm", "value", "bf16", "optimized_last", "resumed"],
)
def test_loop(compare: Comparison, options: dict[str, Any]) -> None:
    compare(training(**options))


def test_by_default(compare: Comparison) -> None:
    compare.by_default(training())


def test_the_example(tmp_path: Path) -> None:
    assert "on nvme" in run_example("accelerate_loop.py", tmp_path)
