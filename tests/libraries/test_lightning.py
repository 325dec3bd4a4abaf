"""Lightning's Trainer around an optimized network."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.support.library_training import Comparison, Optimize, Train, llama, rows, run_example

lightning = pytest.importorskip("lightning", reason="lightning is not installed")


class Module(lightning.LightningModule):
    """Trains a network; ``losses`` are those of all steps."""

    def __init__(self, network: nn.Module, *, is_manual: bool = False) -> None:
        super().__init__()
        self.network = network
        self.losses: list[float] = []
        self.automatic_optimization = not is_manual

    def training_step(self, batch: dict[str, Tensor], index: int) -> Tensor:
        loss: Tensor = self.network(**batch).loss
        self.losses.append(loss.item())
        if not self.automatic_optimization:
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(loss)
            self.clip_gradients(optimizer, gradient_clip_val=1.0, gradient_clip_algorithm="norm")
            optimizer.step()
        return loss

    def validation_step(self, batch: dict[str, Tensor], index: int) -> None:
        self.losses.append(self.network(**batch).loss.item())

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 4)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def batches(num_rows: int) -> Any:
    return torch.utils.data.DataLoader(rows(num_rows), batch_size=2)


def training(*, is_manual: bool = False, resume: bool = False, whole: bool = False, **options: Any) -> Train:
    """Return a training of four steps, or of six from a checkpoint; ``whole``: the LightningModule is optimized."""

    def train(optimize: Optimize, folder: Path) -> tuple[list[Any], nn.Module]:
        given = {
            "max_steps": 4, "accelerator": "cpu", "devices": 1, "logger": False, "enable_checkpointing": False,
            "enable_progress_bar": False, "enable_model_summary": False, "default_root_dir": str(folder),
        }  # fmt: skip

        def make() -> Any:
            network = llama(attn_implementation="eager")
            module = Module(network if whole else optimize(network), is_manual=is_manual)
            return optimize(module) if whole else module

        module = make()
        trainer = lightning.Trainer(**{**given, **options})
        trainer.fit(module, batches(16), batches(4))
        losses = list(module.losses)
        if resume:
            trainer.save_checkpoint(folder / "checkpoint")
            module = make()
            lightning.Trainer(**{**given, **options, "max_steps": 6}).fit(
                module, batches(16), ckpt_path=folder / "checkpoint"
            )
            losses += module.losses
        return losses, module.network

    return train


@pytest.mark.parametrize(
    "options",
    [
        {"gradient_clip_val": 1.0, "accumulate_grad_batches": 2},
        {"precision": "bf16-mixed", "val_check_interval": 2},
        {"is_manual": True},
        {"resume": True},
    ],
    ids=["accumulation", "bf16", "manual", "resumed"],
)
def test_fit(compare: Comparison, options: dict[str, Any]) -> None:
    compare(training(**options))


def test_an_optimized_lightning_module_runs_eagerly(compare: Comparison) -> None:
    """Its own forward is never called, so that nothing is captured."""
    report = compare(training(whole=True), is_captured=False)
    assert not report.plans
    assert report.num_eager_gathers > 0


def test_by_default(compare: Comparison) -> None:
    compare.by_default(training())


def test_the_example(tmp_path: Path) -> None:
    assert "on nvme" in run_example("lightning_module.py", tmp_path)
