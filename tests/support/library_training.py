"""What the tests of `tests/libraries` share: small models, their batches, and the same training plain and optimized."""

import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn

import zinf_compile

VOCAB = 128
BUDGETS = {"device_memory": "2MiB", "host_memory": "1MiB"}  # of about 8 MiB of model states: most of it is on disk
_EVERY_BIT = {"compute": "aten", "tiles": False}  # a tiled loss would be summed in another order
_ROUNDING = 1e-3  # relative, of a loss after a few steps of compiled compute; a wrong value is off by percents

Optimize = Callable[[nn.Module], nn.Module]
Train = Callable[[Optimize, Path], tuple[list[Any], nn.Module]]


def llama(**options: Any) -> nn.Module:
    """Return a Llama of half a million parameters, the same at each call."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=VOCAB, hidden_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=256, max_position_embeddings=64, pad_token_id=0, bos_token_id=1, eos_token_id=2, **options,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


def gpt2() -> nn.Module:
    """Return a GPT-2 of the same size, whose head is its embedding."""
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=VOCAB, n_embd=128, n_layer=2, n_head=4, n_positions=64, bos_token_id=1, eos_token_id=2
    )
    return transformers.GPT2LMHeadModel(config)


def rows(num_rows: int = 16, *, seed: int = 1) -> list[dict[str, Tensor]]:
    """Return a data set of random tokens."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(4, VOCAB, (num_rows, 16), generator=generator)
    return [{"input_ids": each, "labels": each.clone()} for each in tokens]


def weights(model: nn.Module) -> dict[str, Tensor]:
    """Return copies of all parameters."""
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


@dataclass
class Comparison:
    """Runs a training twice, with a plain model in memory and with an optimized one, and compares them.

    A training is a function of ``optimize``, which it calls where a user would and which does nothing in the plain run,
    and of a folder. It returns numbers, such as losses, and the trained model.
    """

    folder: Path

    def __call__(self, train: Train, *, is_captured: bool = True, **options: Any) -> zinf_compile.Report:
        """Compare numbers and parameters bit by bit; return the report of the trained model."""
        plain, ours, report = self._run_both(train, is_captured=is_captured, **(options or _EVERY_BIT))
        assert ours[0] == plain[0]
        assert ours[1].keys() == plain[1].keys()
        different = [name for name, value in plain[1].items() if not torch.equal(value, ours[1][name])]
        assert not different
        return report

    def by_default(self, train: Train) -> zinf_compile.Report:
        """Compare numbers to rounding, with the options that a user has by default: compiled compute."""
        plain, ours, report = self._run_both(train, is_captured=True, compute="inductor")
        torch.testing.assert_close(torch.tensor(ours[0]), torch.tensor(plain[0]), rtol=_ROUNDING, atol=0.0)
        torch.testing.assert_close(ours[0][0], plain[0][0], rtol=1e-5, atol=0.0)
        assert not report.fallbacks
        return report

    def _run_both(self, train: Train, *, is_captured: bool, **options: Any) -> Any:
        optimized: list[nn.Module] = []

        def optimize(model: nn.Module) -> nn.Module:
            optimized.append(zinf_compile.optimize(model, nvme=self.folder, **BUDGETS, **options))
            return model

        results = []
        for name, function in (("plain", lambda model: model), ("ours", optimize)):
            torch._dynamo.reset()
            torch.manual_seed(0)
            (self.folder / name).mkdir()
            numbers, model = train(function, self.folder / name)
            results.append((numbers, weights(model)))
        report = zinf_compile.report(optimized[0])
        for each in optimized:
            if is_captured:
                assert zinf_compile.report(each).plans
            zinf_compile.close(each)
        assert any(route.route.startswith("nvme") and route.nbytes for route in report.moved), report.moved
        return *results, report


def run_example(name: str, folder: Path) -> str:
    """Run a file of `examples` in a process and a folder of its own, with default options; return what it prints."""
    path = Path(__file__).parents[2] / "examples" / name
    lines = path.read_text().splitlines()
    assert len(lines) <= 30, f"{name} has {len(lines)} lines"
    done = subprocess.run([sys.executable, path], cwd=folder, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr
    return done.stdout
