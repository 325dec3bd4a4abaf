"""Quantised parameters are left as they are, beside those in the store: QLoRA with bitsandbytes, and tensor subclasses."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zinf_compile
from zinf_compile.ir.errors import CapacityError, DeviceCapacityError, UnsupportedError
from zinf_compile.ir.glossary import Tier
from zinf_compile.runtime.model.quantised import nbytes_of
from zinf_compile.runtime.params.records import record_of

STEPS = 3
BUDGETS = {"device_memory": "8MiB", "host_memory": "1MiB"}
WIDTH = 128


class Adapted(nn.Module):
    """A frozen layer, quantised or not, with an adapter of two trained layers."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Linear(WIDTH, 4, bias=False)
        self.up = nn.Linear(4, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        adapted: Tensor = self.base(x) + self.up(self.down(x))
        return adapted


def four_bit() -> nn.Module:
    bnb = pytest.importorskip("bitsandbytes")
    layer = bnb.nn.Linear4bit(WIDTH, WIDTH, quant_type="nf4", compress_statistics=True, compute_dtype=torch.float32)
    layer.weight = bnb.nn.Params4bit(
        torch.randn(WIDTH, WIDTH) / 12, requires_grad=False, quant_type="nf4", compress_statistics=True, module=layer
    )
    return layer.to("cpu").requires_grad_(False)  # type: ignore[no-any-return]  # ``to`` quantises


def eight_bit() -> nn.Module:
    bnb = pytest.importorskip("bitsandbytes")
    layer = bnb.nn.Linear8bitLt(WIDTH, WIDTH, has_fp16_weights=False)
    layer.weight = bnb.nn.Int8Params(torch.randn(WIDTH, WIDTH) / 12, requires_grad=False, has_fp16_weights=False)
    return layer.to("cpu").requires_grad_(False)  # type: ignore[no-any-return]  # ``to`` quantises


def tensor_subclass() -> nn.Module:
    quantization = pytest.importorskip("torchao.quantization")
    layer = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
    quantization.quantize_(layer, quantization.Int8WeightOnlyConfig())
    return layer


def adapted(make_base: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.LayerNorm(WIDTH), Adapted(make_base()), nn.GELU(), Adapted(make_base()))


def train(model: nn.Module, called: Callable[..., Any] | None = None) -> list[Tensor]:
    """Return the losses and the trained parameters."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2)
    generator = torch.Generator().manual_seed(1)
    losses = []
    for _ in range(STEPS):
        loss = (model if called is None else called)(torch.randn(8, WIDTH, generator=generator)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return [*losses, *(parameter.detach().clone() for parameter in trained)]


@pytest.mark.parametrize("capture", [True, False], ids=["captured", "eager"])
@pytest.mark.parametrize("make_base", [four_bit, pytest.param(eight_bit, marks=pytest.mark.long), tensor_subclass])
def test_adapters_train_beside_quantised_layers(make_base: Callable[[], nn.Module], capture: bool) -> None:
    plain = train(adapted(make_base))
    if capture:
        model = adapted(make_base)
        captured = train(model, torch.compile(model, backend="aot_eager"))
        torch._dynamo.reset()
    model = adapted(make_base)
    weight = model.get_submodule("1.base").weight
    kept = nbytes_of([weight, model.get_submodule("3.base").weight])
    zinf_compile.optimize(model, capture=capture, **BUDGETS)
    assert model.get_submodule("1.base").weight is weight
    assert record_of(weight) is None
    assert record_of(model.get_submodule("1.down").weight) is not None
    ours = train(model)
    expected = captured if capture else plain
    assert all(torch.equal(a, b) for a, b in zip(ours, expected, strict=True))
    for plan in zinf_compile.report(model).plans:
        assert dict(plan.tier(Tier.DEVICE).parts)["reserve"] == kept
        assert plan.notes[0].startswith(
            f"2 parameters of classes of their own ({type(weight).__name__}) stay as they are"
        )
    zinf_compile.close(model)


def test_by_default_as_close_as_compiled_code() -> None:
    plain = train(adapted(four_bit))
    model = zinf_compile.optimize(adapted(four_bit), compute="inductor", **BUDGETS)
    ours = train(model)
    assert all(torch.allclose(a, b, rtol=1e-4, atol=1e-5) for a, b in zip(ours, plain, strict=True))
    zinf_compile.close(model)


def test_what_stays_counts_against_the_device_budget() -> None:
    model = adapted(four_bit)
    weights = [model.get_submodule(name).weight for name in ("1.base", "3.base")]
    kept = nbytes_of(weights)
    # half a byte per element, one byte for the scale of 64 elements, and the code tables of both
    assert WIDTH * WIDTH < kept < WIDTH * WIDTH + 2 * WIDTH * WIDTH / 64 + 2**13
    with pytest.raises(
        CapacityError, match=r"stay as they are on the device, .* raise it to 1MiB plus activation memory"
    ):
        zinf_compile.optimize(model, device_memory=kept, host_memory="1MiB")
    needs = []
    for more in (0, 2**20):  # bytes of ``reserve_memory``
        model = zinf_compile.optimize(
            adapted(four_bit), device_memory=kept + more + 2**12, reserve_memory=more, host_memory="1MiB"
        )
        with pytest.raises(DeviceCapacityError) as refused:
            model(torch.ones(8, WIDTH))
        needs.append(refused.value.needed_nbytes)
        zinf_compile.close(model)
    assert needs[0] > kept
    assert needs[1] == needs[0] + 2**20


def test_what_cannot_stay_is_refused() -> None:
    first = zinf_compile.optimize(nn.Linear(4, 4), **BUDGETS)
    with pytest.raises(
        UnsupportedError, match=r"'1\.base\.weight' and 1 more parameters are no plain ones \(Params4bit\), for"
    ):
        zinf_compile.optimize(adapted(four_bit), share=first)
    with pytest.raises(UnsupportedError, match="which init cannot give values"):
        zinf_compile.optimize(adapted(four_bit), init="somewhere.safetensors", **BUDGETS)
    zinf_compile.close(first)


def test_plain_subclasses_move_home() -> None:
    class Named(nn.Parameter):
        role = "scale"

    model = nn.Linear(WIDTH, WIDTH)
    model.weight = Named(model.weight.detach())
    zinf_compile.optimize(model, **BUDGETS)
    assert record_of(model.weight) is not None
    zinf_compile.close(model)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(
    "capture", [False, pytest.param(True, marks=[pytest.mark.long, pytest.mark.slow])], ids=["eager", "captured"]
)
def test_qlora_of_a_llama_as_people_write_it(bits: int, capture: bool, tmp_path: Path) -> None:
    """Load the base quantised, prepare it, add adapters, optimize: bitwise plain PEFT."""
    pytest.importorskip("bitsandbytes")
    transformers, peft = pytest.importorskip("transformers"), pytest.importorskip("peft")
    config = transformers.LlamaConfig(
        vocab_size=96, hidden_size=64, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=96, use_cache=False,
    )  # fmt: skip
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path)
    quantised = transformers.BitsAndBytesConfig(
        **{f"load_in_{bits}bit": True}, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True
    )

    def prepared() -> nn.Module:
        model = transformers.LlamaForCausalLM.from_pretrained(
            tmp_path, quantization_config=quantised, device_map="cpu", dtype=torch.float32
        )
        model = peft.prepare_model_for_kbit_training(model, gradient_checkpointing_kwargs={"use_reentrant": False})
        torch.manual_seed(0)
        adapters = peft.LoraConfig(
            r=4, lora_alpha=8, lora_dropout=0.0, target_modules="all-linear", task_type="CAUSAL_LM"
        )
        return peft.get_peft_model(model, adapters)  # type: ignore[no-any-return]

    def losses_of(model: nn.Module, called: Callable[..., Any]) -> list[Tensor]:
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        optimizer, losses = torch.optim.AdamW(trained, lr=1e-2), []
        for tokens in torch.randint(4, 96, (STEPS, 2, 8), generator=torch.Generator().manual_seed(1)):
            loss = called(input_ids=tokens, labels=tokens).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        return [*losses, *(parameter.detach().clone() for parameter in trained)]

    model = prepared().train()
    expected = losses_of(model, torch.compile(model, backend="aot_eager") if capture else model)
    torch._dynamo.reset()
    model = zinf_compile.optimize(prepared().train(), capture=capture, **BUDGETS)
    ours = losses_of(model, model)
    assert all(torch.equal(a, b) for a, b in zip(ours, expected, strict=True))
    assert not torch.equal(ours[0], ours[STEPS - 1])
    zinf_compile.close(model)
