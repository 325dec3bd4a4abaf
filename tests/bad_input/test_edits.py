"""Edits of a model after ``optimize`` are refused with an error that says when to do them, and the model still trains."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, prune, spectral_norm, weight_norm

import zinf_compile
from zinf_compile.ir.errors import UnsupportedError

BUDGETS = {"device_memory": "8MiB", "host_memory": "8MiB"}
LIVES = r"it lives in a store since optimize\(\); "
BEFORE = LIVES + r"prune, reparametrize or replace parameters before zinf_compile\.optimize\(model\)"
WRITE = LIVES + r"write into it instead, or do this before zinf_compile\.optimize\(model\)"


def replace_weight(model: nn.Module) -> None:
    linear = model[0]  # type: ignore[index]
    del linear._parameters["weight"]
    linear.register_parameter("weight", nn.Parameter(torch.zeros(200, 200)))


EDITS: dict[str, tuple[Callable[[nn.Module], object], str]] = {
    "prune": (
        lambda model: prune.l1_unstructured(model[0], "weight", amount=0.5),  # type: ignore[index]
        rf"cannot register '0\.weight' a second time as 'weight_orig': {BEFORE}",
    ),
    "weight_norm": (
        lambda model: weight_norm(model[0]),  # type: ignore[index]
        rf"cannot replace '0\.weight' by 'weight_g': {BEFORE}",
    ),
    "parametrizations.weight_norm": (
        lambda model: parametrizations.weight_norm(model[0]),  # type: ignore[index]
        rf"cannot make another parameter of '0\.weight': {LIVES}make it of a copy, as weight\.detach\(\)\.clone\(\) is, or "
        r"do this before zinf_compile\.optimize\(model\)",
    ),
    "spectral_norm": (lambda model: spectral_norm(model[0]), rf"cannot delete '0\.weight': {BEFORE}"),  # type: ignore[index]
    "parametrizations.spectral_norm": (
        lambda model: parametrizations.spectral_norm(model[0]),  # type: ignore[index]
        rf"cannot give '0\.weight' other memory or another shape \(set_\): {WRITE}",
    ),
    "parametrizations.orthogonal": (
        lambda model: parametrizations.orthogonal(model[0]),  # type: ignore[index]
        rf"cannot give '0\.weight' other memory or another shape \(set_\): {WRITE}",
    ),
    "another in its place": (replace_weight, rf"cannot replace '0\.weight' by 'weight': {BEFORE}"),
    "transposed in place": (
        lambda model: model[0].weight.t_(),  # type: ignore[index]
        rf"cannot give '0\.weight' other memory or another shape \(t_\): {WRITE}",
    ),
    "to meta": (lambda model: model.to("meta"), r"cannot move 0 to the meta device: its parameters live in a store"),
    "half": (
        lambda model: model.half(),
        r"cannot make '0\.weight', \(200, 200\) torch\.float32 on cpu, into \(200, 200\) torch\.float16 on cpu: .* resize "
        r"or convert the model before zinf_compile\.optimize\(model\), and for the dtype of compute say compute_dtype",
    ),
    "averaged": (
        lambda model: torch.optim.swa_utils.AveragedModel(model),
        r"an optimized Sequential cannot be copied: .* before optimize\(\), or load its state_dict\(\) into a new one",
    ),
}


@pytest.mark.parametrize("name", EDITS)
def test_an_edit_is_refused_and_changes_nothing(name: str, model: nn.Sequential) -> None:
    edit, message = EDITS[name]
    plain = copy.deepcopy(model)
    zinf_compile.optimize(model, capture=False, **BUDGETS)
    with pytest.raises(UnsupportedError, match=message):
        edit(model)
    assert [key for key, _ in model.named_parameters()] == [key for key, _ in plain.named_parameters()]
    for each in (plain, model):
        optimizer = torch.optim.SGD(each.parameters(), lr=0.1)
        each(torch.ones(2, 200)).sum().backward()
        optimizer.step()
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(one, other)
        assert torch.equal(one.grad, other.grad)
    assert list(model.state_dict()) == list(plain.state_dict())
    zinf_compile.close(model)


def small_llama() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=96, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=48, use_cache=False
    )
    model: nn.Module = transformers.LlamaForCausalLM(config)
    return model


def save_a_head(model: nn.Module) -> None:
    peft = pytest.importorskip("peft")
    peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"], modules_to_save=["lm_head"]))


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (
            lambda model: model.resize_token_embeddings(100),
            r"cannot make 'model\.embed_tokens\.weight', .* into \(100, 32\) .*; resize or convert the model before",
        ),
        (save_a_head, r"cannot be copied: .*; do what copies it, as .* peft's modules_to_save do, before optimize\(\)"),
    ],
    ids=["resize_token_embeddings", "modules_to_save"],
)
def test_an_edit_of_a_language_model(edit: Callable[[nn.Module], object], message: str) -> None:
    tokens = torch.arange(16).view(2, 8)
    expected = small_llama()(input_ids=tokens, labels=tokens).loss
    model = zinf_compile.optimize(small_llama(), capture=False, **BUDGETS)
    with pytest.raises(UnsupportedError, match=message):
        edit(model)
    loss = model(input_ids=tokens, labels=tokens).loss
    assert torch.equal(loss, expected)
    loss.backward()
    torch.optim.SGD([parameter for parameter in model.parameters() if parameter.grad is not None], lr=0.1).step()
    zinf_compile.close(model)
