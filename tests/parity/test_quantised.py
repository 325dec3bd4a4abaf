"""Quantised parameters: their tensors are stored and gathered as they are. QLoRA with bitsandbytes, and torchao."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zinf_compile
from tests.support import quantised_training
from tests.support.quantised_training import STEPS, bytes_of, equal
from zinf_compile.ir.errors import CapacityError, DeviceCapacityError, UnsupportedError
from zinf_compile.ir.glossary import Tier
from zinf_compile.runtime.model.quantised import find_quantised, quantised_tensors
from zinf_compile.runtime.params.records import record_of

BUDGETS = {"device_memory": "8MiB", "host_memory": "1MiB"}
WIDTH = 256
train = partial(quantised_training.train, width=WIDTH, lr=1e-2)
LAYERS = 16


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


def of_torchao(config: str) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        quantization = pytest.importorskip("torchao.quantization")
        layer = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        quantization.quantize_(layer, getattr(quantization, config)())
        return layer

    return make


def outliers() -> nn.Module:
    """LLM.int8() with its outlier columns."""
    layer = eight_bit()
    layer.state.threshold = 1.0  # type: ignore[union-attr]
    return layer


BASES = [
    pytest.param(four_bit, id="nf4"),
    pytest.param(eight_bit, id="int8"),
    pytest.param(outliers, id="outliers", marks=pytest.mark.long),
    pytest.param(of_torchao("Int8WeightOnlyConfig"), id="torchao_int8"),
    pytest.param(of_torchao("IntxWeightOnlyConfig"), id="torchao_intx", marks=pytest.mark.long),
    pytest.param(of_torchao("Float8WeightOnlyConfig"), id="torchao_float8", marks=pytest.mark.long),
]


def adapted(make_base: Callable[[], nn.Module], num_layers: int = 2) -> nn.Module:
    torch.manual_seed(0)
    layers = [module for _ in range(num_layers) for module in (Adapted(make_base()), nn.GELU())]
    return nn.Sequential(nn.LayerNorm(WIDTH), *layers[:-1])


PLACES = {
    "device": {"device_memory": "8MiB", "host_memory": "2MiB"},
    "host": {"device_memory": "1MiB", "host_memory": "8MiB"},
    "nvme": {"device_memory": "1MiB", "host_memory": "600KiB"},
}


SLOW = pytest.param(True, marks=pytest.mark.long)  # captures all layers twice


@pytest.mark.parametrize("make_base", BASES)
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("capture", [SLOW, False], ids=["captured", "eager"])
@pytest.mark.needs_more_on_streams(device_memory=3, host_memory=1.25)  # where these weights stay on the device
def test_adapters_train_on_quantised_layers(
    make_base: Callable[[], nn.Module], place: str, capture: bool, tmp_path: Path
) -> None:
    """Losses and adapters are bitwise those of the same library in memory, and no quantised byte changes."""
    options = PLACES[place] | ({"nvme": tmp_path} if place == "nvme" else {})
    model = adapted(make_base, LAYERS)
    expected = train(model, torch.compile(model, backend="aot_eager") if capture else None)
    before = bytes_of(model)
    torch._dynamo.reset()
    model = adapted(make_base, LAYERS)
    weights = [model.get_submodule(f"{2 * layer + 1}.base").weight for layer in range(LAYERS)]
    zinf_compile.optimize(model, capture=capture, **options)
    assert all(model.get_submodule(f"{2 * layer + 1}.base").weight is weights[layer] for layer in range(LAYERS))
    assert all(record_of(weight) is None for weight in weights)
    assert record_of(model.get_submodule("1.down").weight) is not None
    ours = train(model)
    assert equal(ours, expected)
    assert equal(bytes_of(model), before)
    report = zinf_compile.report(model)
    if place != "device" and capture:
        (plan,) = report.plans
        homes = {home.compute for home in plan.placements if ".base.weight" in home.parameter}
        assert (Tier.HOST if place == "host" else Tier.NVME) in homes
        (device,) = (tier for tier in report.tiers if tier.tier is Tier.DEVICE)
        assert device.capacity is not None
        assert device.predicted_peak <= device.capacity
        if hasattr(weights[0], "quant_state"):  # not of torchao, and not every run of int8: see docs/limits.md
            assert device.measured_peak <= device.predicted_peak
    for plan in report.plans:
        assert (
            f"{LAYERS} parameters of classes of their own ({type(weights[0]).__name__}) have tensors" in plan.notes[0]
        )
    zinf_compile.close(model)
    assert equal(bytes_of(model), before)


@pytest.mark.parametrize("make_base", BASES)
def test_captured_with_all_on_the_device(make_base: Callable[[], nn.Module]) -> None:
    model = adapted(make_base)
    expected = train(model, torch.compile(model, backend="aot_eager"))
    torch._dynamo.reset()
    model = zinf_compile.optimize(adapted(make_base), **BUDGETS)
    assert equal(train(model), expected)
    (plan,) = zinf_compile.report(model).plans  # one capture
    assert "1.base" in " ".join(home.parameter for home in plan.placements)
    zinf_compile.close(model)


def test_by_default_as_close_as_compiled_code() -> None:
    plain = train(adapted(four_bit))
    model = zinf_compile.optimize(adapted(four_bit), compute="inductor", **BUDGETS)
    ours = train(model)
    assert all(torch.allclose(a, b, rtol=1e-4, atol=1e-5) for a, b in zip(ours, plain, strict=True))
    zinf_compile.close(model)


@pytest.mark.of_a_cpu(reason="a device with memory of its own keeps these weights whole")
def test_what_is_small_stays_and_counts_against_the_device_budget() -> None:
    model = adapted(four_bit)
    found = find_quantised(model, may_store=True)
    names = [name for components in found.components.values() for name in components]
    assert names == ["1.base.weight", "3.base.weight"]  # 32 KiB each; the scales of 64 elements take 1 KiB
    assert found.stored_nbytes == WIDTH * WIDTH
    assert 2 * WIDTH * WIDTH / 64 < found.kept_nbytes < 2 * WIDTH * WIDTH / 64 + 2**13
    whole = find_quantised(model, may_store=False)
    assert whole.kept_nbytes == found.kept_nbytes + found.stored_nbytes
    with pytest.raises(
        CapacityError, match=r"the others stay on the device, .* raise it to 1MiB plus activation memory"
    ):
        zinf_compile.optimize(model, device_memory=found.kept_nbytes, host_memory="1MiB")
    needs = []
    for more in (0, 2**20):  # bytes of ``reserve_memory``
        model = zinf_compile.optimize(
            adapted(four_bit), device_memory=found.kept_nbytes + more + 2**17, reserve_memory=more, host_memory="1MiB"
        )
        with pytest.raises(DeviceCapacityError) as refused:
            model(torch.ones(8, WIDTH))
        needs.append(refused.value.needed_nbytes)
        zinf_compile.close(model)
    assert needs[0] > found.kept_nbytes
    assert needs[1] == needs[0] + 2**20


def test_checked_stores_leave_them_where_they_are(tmp_path: Path) -> None:
    """A write through a tensor of another library cannot be observed, and would look like damage."""
    model = zinf_compile.optimize(adapted(four_bit), verify_store=True, nvme=tmp_path, **BUDGETS)
    train(model)
    (plan,) = zinf_compile.report(model).plans
    assert any("stay as they are on the device" in note for note in plan.notes)
    zinf_compile.close(model)


@pytest.mark.of_a_cpu(reason="a device with memory of its own keeps these weights whole")
def test_weights_with_other_memory_are_refused_by_name() -> None:
    model = zinf_compile.optimize(adapted(four_bit), **BUDGETS)
    model(torch.ones(8, WIDTH))
    weight = model.get_submodule("1.base").weight
    with torch._C.DisableTorchFunctionSubclass():
        weight.data = weight.data.clone()
    with pytest.raises(UnsupportedError, match=r"'1\.base\.weight' was given other memory after optimize"):
        model(torch.ones(8, WIDTH))
    zinf_compile.close(model)


def test_a_replaced_weight_is_captured_again() -> None:
    """As peft does when it merges an adapter."""
    model, other = zinf_compile.optimize(adapted(four_bit), **BUDGETS), adapted(four_bit)
    model(torch.ones(8, WIDTH))
    torch.manual_seed(1)
    for changed in (model, other):
        torch.manual_seed(1)
        changed.get_submodule("1.base").weight = four_bit().weight
    assert torch.equal(model(torch.ones(8, WIDTH)), other(torch.ones(8, WIDTH)))
    zinf_compile.close(model)


@pytest.mark.parametrize("make_base", BASES)
@pytest.mark.needs_more_on_streams(device_memory=3, host_memory=1.25)  # where these weights stay on the device
def test_state_is_what_it_was(make_base: Callable[[], nn.Module], tmp_path: Path) -> None:
    """``state_dict``, full parameters, ``to`` and checkpoints, of a base on disk."""
    plain, options = adapted(make_base, LAYERS), PLACES["nvme"] | {"nvme": tmp_path, "capture": False}
    model = zinf_compile.optimize(adapted(make_base, LAYERS), **options)
    state = plain.state_dict()
    assert list(model.state_dict()) == list(state)
    before, x = bytes_of(plain), torch.ones(8, WIDTH)
    expected = plain(x)
    with zinf_compile.full_parameters(model):
        assert torch.equal(model(x), expected)
    assert torch.equal(model.to("cpu")(x), expected)
    zinf_compile.save(tmp_path / "saved", model)
    for start in (adapted(make_base, LAYERS), model):
        for tensor in (tensor for found in quantised_tensors(start).values() for tensor in found.values()):
            tensor.zero_()
        assert not torch.equal(start(x), expected)
        zinf_compile.load(tmp_path / "saved", start)
        assert torch.equal(start(x), expected)
        assert equal(bytes_of(start), before)
    zinf_compile.close(model)


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

    model = nn.Linear(WIDTH // 2, WIDTH // 2)
    model.weight = Named(model.weight.detach())
    zinf_compile.optimize(model, **BUDGETS)
    assert record_of(model.weight) is not None
    zinf_compile.close(model)


def _config_of(quantisation: str) -> Any:
    """Return how transformers quantises a base while it loads it."""
    transformers = pytest.importorskip("transformers")
    if quantisation == "torchao":
        quantization = pytest.importorskip("torchao.quantization")
        return transformers.TorchAoConfig(quantization.Int8WeightOnlyConfig())
    pytest.importorskip("bitsandbytes")
    bits = {"nf4": 4, "int8": 8}[quantisation]
    return transformers.BitsAndBytesConfig(
        **{f"load_in_{bits}bit": True}, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True
    )


@pytest.mark.parametrize("quantisation", ["nf4", "int8", "torchao"])
@pytest.mark.parametrize(
    "capture", [False, pytest.param(True, marks=[pytest.mark.long, pytest.mark.slow])], ids=["eager", "captured"]
)
def test_qlora_of_a_llama_as_people_write_it(quantisation: str, capture: bool, tmp_path: Path) -> None:
    """Load the base quantised, prepare it, add adapters, optimize; save the adapters and merge them: as plain PEFT."""
    transformers, peft = pytest.importorskip("transformers"), pytest.importorskip("peft")
    safetensors = pytest.importorskip("safetensors.torch")
    config = transformers.LlamaConfig(
        vocab_size=96, hidden_size=64, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=128, use_cache=False,
    )  # fmt: skip
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path)
    quantised = _config_of(quantisation)

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

    def saved_and_merged(model: Any, folder: str) -> list[Tensor]:
        """Return the saved adapters, and the logits of the base with the adapters merged into its weights.

        In training mode: else bitsandbytes packs the weights of a plain model anew, for a product in bfloat16.
        """
        model.save_pretrained(tmp_path / folder)
        saved = safetensors.load_file(tmp_path / folder / "adapter_model.safetensors")
        merged = model.merge_and_unload()
        assert not any("lora" in name for name, _ in merged.named_parameters())
        with torch.no_grad():
            return [
                *(saved[name] for name in sorted(saved)),
                merged.train()(input_ids=torch.arange(4, 12)[None]).logits,
            ]

    model = prepared().train()
    expected = losses_of(model, torch.compile(model, backend="aot_eager") if capture else model)
    expected_merged = saved_and_merged(model, "plain")
    torch._dynamo.reset()
    model = zinf_compile.optimize(prepared().train(), capture=capture, **BUDGETS)
    ours = losses_of(model, model)
    assert equal(ours, expected)
    assert not torch.equal(ours[0], ours[STEPS - 1])
    assert equal(saved_and_merged(model, "ours"), expected_merged)
    zinf_compile.close(model)
