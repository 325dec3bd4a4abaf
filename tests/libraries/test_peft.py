"""peft's adapters on an optimized model: trained, saved, loaded, merged, switched."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zinf_compile
from tests.support.library_training import BUDGETS, Comparison, Optimize, Train, llama, rows, run_example
from zinf_compile.ir.errors import UnsupportedError

peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")

_LAYERS = ["q_proj", "v_proj", "down_proj"]
CONFIGS: dict[str, Callable[[], Any]] = {
    "lora": lambda: peft.LoraConfig(r=4, target_modules=_LAYERS, lora_dropout=0.1, task_type="CAUSAL_LM"),
    "dora": lambda: peft.LoraConfig(r=4, target_modules=_LAYERS, use_dora=True, task_type="CAUSAL_LM"),
    "modules_to_save": lambda: peft.LoraConfig(
        r=4, target_modules=_LAYERS, modules_to_save=["lm_head", "norm"], task_type="CAUSAL_LM"
    ),
    "tokens": lambda: peft.LoraConfig(
        r=4, target_modules=_LAYERS, trainable_token_indices=[5, 6], task_type="CAUSAL_LM"
    ),
    "ia3": lambda: peft.IA3Config(
        target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"], task_type="CAUSAL_LM"
    ),
    "prompt": lambda: peft.PromptTuningConfig(num_virtual_tokens=4, task_type="CAUSAL_LM"),
    "prefix": lambda: peft.PrefixTuningConfig(num_virtual_tokens=4, task_type="CAUSAL_LM"),
}


def run_steps(model: nn.Module, num_steps: int = 3) -> list[float]:
    """Train with AdamW and clipping; return losses and norms."""
    model.train()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    tokens = torch.stack([row["input_ids"] for row in rows(2 * num_steps)]).unflatten(0, (num_steps, 2))
    torch.manual_seed(5)
    numbers = []
    for each in tokens:
        loss = model(input_ids=each, labels=each, attention_mask=torch.ones_like(each)).loss
        loss.backward()
        numbers += [loss.item(), torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).item()]
        optimizer.step()
        optimizer.zero_grad()
    return numbers


@torch.no_grad()
def outputs(model: nn.Module) -> list[Any]:
    """Return the logits of a batch."""
    tokens = torch.stack([row["input_ids"] for row in rows(2, seed=9)])
    logits: list[Any] = model.eval()(input_ids=tokens, attention_mask=torch.ones_like(tokens)).logits.tolist()
    return logits


def training(
    config: str, then: Callable[[Any, Path], list[Any]] | None = None, *, is_base_first: bool = False
) -> Train:
    """Return a training of adapters, and of what ``then`` does with them."""

    def train(optimize: Optimize, folder: Path) -> tuple[list[Any], nn.Module]:
        if is_base_first:
            model = peft.get_peft_model(optimize(llama()), CONFIGS[config]())
        else:
            model = optimize(peft.get_peft_model(llama(), CONFIGS[config]()))
        numbers: list[Any] = list(run_steps(model))
        return numbers + (then(model, folder) if then else []), model

    return train


@pytest.mark.parametrize("config", CONFIGS)
def test_adapters(compare: Comparison, config: str) -> None:
    compare(training(config))


@pytest.mark.parametrize("config", ["lora", "ia3", "prompt"])
def test_adapters_of_a_base_that_was_optimized_before(compare: Comparison, config: str) -> None:
    compare(training(config, is_base_first=True))


def test_modules_to_save_of_a_base_that_was_optimized_before_are_refused(tmp_path: Path) -> None:
    base = zinf_compile.optimize(llama(), **BUDGETS, nvme=tmp_path)
    with pytest.raises(UnsupportedError, match=r"do what copies it, as .* modules_to_save do, before optimize"):
        peft.get_peft_model(base, CONFIGS["modules_to_save"]())
    zinf_compile.close(base)


def test_adapters_of_target_parameters_are_refused_before_anything_moves(tmp_path: Path) -> None:
    config = peft.LoraConfig(r=4, target_modules=[], target_parameters=["self_attn.q_proj.weight"])
    model = peft.get_peft_model(llama(), config)
    with pytest.raises(
        UnsupportedError, match=r"q_proj' has adapters of target_parameters, .* with target_modules instead"
    ):
        zinf_compile.optimize(model, **BUDGETS, nvme=tmp_path)
    assert run_steps(model)


class Attention(nn.Module):
    """Attention of torch's own, and a layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.attention = nn.MultiheadAttention(128, 4)
        self.head = nn.Linear(128, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return eight numbers of each row."""
        head: torch.Tensor = self.head(self.attention(x, x, x)[0])
        return head


def test_adapters_of_torchs_own_attention_train_eagerly(tmp_path: Path) -> None:
    """peft merges them into the weight in every forward, of which no backend of torch can capture a graph."""

    def adapted() -> Any:
        model = peft.get_peft_model(Attention(), peft.LoraConfig(r=4, target_modules=["attention"]))
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                nn.init.normal_(parameter)
        return model

    def losses(model: nn.Module) -> list[float]:
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1e-2)
        torch.manual_seed(2)
        numbers = []
        for _ in range(3):
            loss = model(torch.randn(9, 128)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            numbers.append(loss.item())
        return numbers

    torch.manual_seed(1)
    plain = losses(adapted())
    torch.manual_seed(1)
    model = adapted()
    with pytest.raises(
        UnsupportedError, match=r"attention' is a torch\.nn\.MultiheadAttention with LoRA, .* capture=False"
    ):
        zinf_compile.optimize(model, **BUDGETS, nvme=tmp_path)
    zinf_compile.optimize(model, **BUDGETS, nvme=tmp_path, capture=False)
    assert losses(model) == plain
    zinf_compile.close(model)


@pytest.mark.parametrize("config", ["lora", "modules_to_save", "prompt"])
def test_saved_adapters_load_onto_a_plain_base(compare: Comparison, config: str) -> None:
    def save(model: Any, folder: Path) -> list[Any]:
        model.save_pretrained(folder / "adapters")
        loaded = peft.PeftModel.from_pretrained(llama(), folder / "adapters")
        return [outputs(model), outputs(loaded)]

    compare(training(config, save))


@pytest.mark.parametrize("config", ["lora", "dora"])
def test_merging(compare: Comparison, config: str) -> None:
    def merge(model: Any, folder: Path) -> list[Any]:
        before = outputs(model)
        merged = model.merge_and_unload()
        merged.save_pretrained(folder / "merged")
        loaded = transformers.LlamaForCausalLM.from_pretrained(folder / "merged")
        return [before, outputs(merged), outputs(loaded)]

    compare(training(config, merge))


def test_a_second_adapter_merged_switched_and_deleted(compare: Comparison) -> None:
    def switch(model: Any, folder: Path) -> list[Any]:
        model.add_adapter("second", CONFIGS["lora"]())
        model.set_adapter("second")
        numbers: list[Any] = list(run_steps(model, 2))
        model.set_adapter("default")
        model.merge_adapter()
        numbers.append(outputs(model))
        model.unmerge_adapter()
        model.delete_adapter("second")
        with model.disable_adapter():
            numbers.append(outputs(model))
        return numbers

    compare(training("lora", switch))


def test_by_default(compare: Comparison) -> None:
    compare.by_default(training("modules_to_save"))


def test_the_example(tmp_path: Path) -> None:
    assert "on nvme" in run_example("peft_lora.py", tmp_path)
