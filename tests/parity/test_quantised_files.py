"""Quantised bases on meta: served from the files that bitsandbytes has saved, bitwise as in memory, not copied."""

import json
import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zinf_compile
from tests.support import quantised_training
from tests.support.quantised_training import STEPS, bytes_of, equal
from zinf_compile.ir.errors import CapacityError, CheckpointError, ConfigError, StoreError, UnsupportedError
from zinf_compile.runtime.model.quantised import quantised_tensors
from zinf_compile.runtime.params.records import record_of
from zinf_compile.runtime.storage.nvme import posix
from zinf_compile.runtime.store.store import Store

bnb = pytest.importorskip("bitsandbytes")
safetensors = pytest.importorskip("safetensors.torch")

WIDTH = 512  # 128 KiB of codes in nf4, and 4 KiB of their scales, a layer
train = partial(quantised_training.train, width=WIDTH, lr=1e-3)
LAYERS = 8
BUDGETS: dict[str, Any] = {"device_memory": "4MiB", "host_memory": "600KiB", "reserve_memory": 0, "compute": "aten"}
pytestmark = pytest.mark.of_a_cpu(reason="a device with memory of its own keeps these weights whole")


def four_bit(quant_type: str = "nf4", *, nested: bool = True) -> Callable[[], nn.Linear]:
    def make() -> nn.Linear:
        layer = bnb.nn.Linear4bit(
            WIDTH, WIDTH, quant_type=quant_type, compress_statistics=nested, compute_dtype=torch.float32
        )
        return layer.requires_grad_(False)  # type: ignore[no-any-return]

    return make


def eight_bit() -> nn.Linear:
    return bnb.nn.Linear8bitLt(WIDTH, WIDTH, has_fp16_weights=False).requires_grad_(False)  # type: ignore[no-any-return]


MAKERS = {
    "nf4": four_bit(),
    "fp4": four_bit("fp4", nested=False),
    "int8": eight_bit,
    "plain": lambda: nn.Linear(WIDTH, WIDTH).requires_grad_(False),
}
IN_PLACE = {  # bytes of a layer that are 4 KiB or more
    "nf4": WIDTH * WIDTH // 2 + WIDTH * WIDTH // 64,
    "fp4": WIDTH * WIDTH // 2 + WIDTH * WIDTH // 64 * 4,
    "int8": WIDTH * WIDTH,
}


class Base(nn.Module):
    """Frozen layers, to which adapters are added later."""

    def __init__(self, make: Callable[[], nn.Linear], num_layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(make() for _ in range(num_layers))
        self.adapters = nn.ModuleList()

    def forward(self, x: Tensor) -> Tensor:
        for layer, (down, up) in zip(self.layers, self.adapters, strict=True):
            x = x + torch.tanh(layer(x) + up(down(x)))
        return x


def in_memory(kind: str, num_layers: int = LAYERS) -> Base:
    torch.manual_seed(0)
    return Base(MAKERS[kind], num_layers).to("cpu")  # which quantises


def on_meta(kind: str, num_layers: int = LAYERS) -> Base:
    with torch.device("meta"):
        return Base(MAKERS[kind], num_layers)


def adapted(base: Base) -> Base:
    """Add adapters, as peft does after ``optimize``."""
    torch.manual_seed(1)
    for _ in base.layers:
        base.adapters.append(nn.ModuleList([nn.Linear(WIDTH, 4, bias=False), nn.Linear(4, WIDTH, bias=False)]))
    return base


def saved(folder: Path, model: nn.Module, change: Callable[[dict[str, Tensor]], object] | None = None) -> Path:
    """Write a checkpoint as transformers does."""
    state = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    if change is not None:
        change(state)
    folder.mkdir()
    safetensors.save_file(state, folder / "model.safetensors")
    return folder


_opened: list[nn.Module] = []


@pytest.fixture(autouse=True)
def _closed() -> Iterator[None]:
    """Close every model at the end of a test."""
    yield
    while _opened:
        zinf_compile.close(_opened.pop())


def optimized(base: nn.Module, source: Path, **options: Any) -> Any:
    _opened.append(base)
    return zinf_compile.optimize(base, init=source, **{"nvme": source.parent, **BUDGETS, **options})


def store_of(model: nn.Module) -> Store:
    record = record_of(next(parameter for parameter in model.parameters() if record_of(parameter) is not None))
    assert record is not None
    assert isinstance(record.store, Store)
    return record.store


SLOW = pytest.param(True, marks=pytest.mark.long)


@pytest.mark.parametrize("kind", ["nf4", "fp4", "int8"])
@pytest.mark.parametrize("capture", [True, False], ids=["captured", "eager"])
def test_training_is_bitwise_that_in_memory(kind: str, capture: bool, tmp_path: Path) -> None:
    """The codes and the larger statistics are served from the file; nothing is written, and nothing read in loading."""
    plain = in_memory(kind)
    source = saved(tmp_path / "base", plain)
    content = (source / "model.safetensors").read_bytes()
    expected_bytes = bytes_of(plain)
    adapted(plain)
    expected = train(plain, torch.compile(plain, backend="aot_eager") if capture else None)
    torch._dynamo.reset()
    base = on_meta(kind)
    weights = [layer.weight for layer in base.layers]
    optimized(base, source, capture=capture, device_memory="3MiB")
    assert all(layer.weight is weight for layer, weight in zip(base.layers, weights, strict=True))
    report, store = zinf_compile.report(base), store_of(base)
    assert report.in_place_nbytes > LAYERS * IN_PLACE[kind] - 600 * 2**10  # what host memory takes
    assert report.weight_files == (str(source / "model.safetensors"),)
    assert sum(file.bytes_read for file in store._weight_files.values()) == 0
    assert isinstance(store.engine, posix.PosixEngine)
    assert os.stat(store.engine.path).st_blocks == 0
    ours = train(adapted(base))
    assert equal(ours, expected)
    assert equal(bytes_of(base), expected_bytes)
    assert (os.stat(store.engine.path).st_blocks, report.fallbacks) == (0, ())
    if capture:
        (plan,) = zinf_compile.report(base).plans
        assert (
            f"{LAYERS} parameters of classes of their own ({type(weights[0]).__name__}) have tensors" in plan.notes[0]
        )
        assert sum(file.bytes_read for file in store._weight_files.values()) > 0
    zinf_compile.close(base)
    assert equal(bytes_of(base), expected_bytes)
    assert (source / "model.safetensors").read_bytes() == content


@pytest.mark.parametrize("kind", ["nf4", "int8"])
def test_where_there_is_no_disk_the_files_are_read(kind: str, tmp_path: Path) -> None:
    plain = in_memory(kind)
    source = saved(tmp_path / "base", plain)
    base = on_meta(kind)
    optimized(base, source, nvme=None, capture=False, host_memory="8MiB")
    assert zinf_compile.report(base).in_place_nbytes == 0
    assert equal(bytes_of(base), bytes_of(plain))
    assert equal(train(adapted(base)), train(adapted(plain)))


@pytest.mark.slow
def test_by_default_bitwise_as_from_memory(tmp_path: Path) -> None:
    """With compiled compute, the bits are those of the same base that was quantised in memory before optimize()."""
    options = {"compute": "inductor", "nvme": tmp_path, "device_memory": "2MiB"}
    plain = in_memory("nf4", 4)
    source = saved(tmp_path / "base", plain)
    _opened.append(zinf_compile.optimize(plain, **{**BUDGETS, **options}))
    expected = train(adapted(plain))
    torch._dynamo.reset()
    base = optimized(on_meta("nf4", 4), source, **options)
    assert equal(train(adapted(base)), expected)


def cut(file: Path) -> None:
    os.truncate(file, 9000)


@pytest.mark.parametrize("change", [cut, os.utime])
@pytest.mark.parametrize("capture", [True, False], ids=["captured", "eager"])
def test_a_changed_file_is_named(change: Callable[[Path], None], capture: bool, tmp_path: Path) -> None:
    source = saved(tmp_path / "base", in_memory("nf4"))
    base = adapted(optimized(on_meta("nf4"), source, capture=capture, device_memory="2MiB"))
    x = torch.randn(8, WIDTH)
    base(x)
    change(source / "model.safetensors")
    with pytest.raises(StoreError, match=r"base/model.safetensors has changed since optimize\(\) opened it"):
        base(x)


@pytest.mark.parametrize("capture", [True, False], ids=["captured", "eager"])
def test_a_write_into_codes_counts(capture: bool, tmp_path: Path) -> None:
    """They leave the file for the store, as plain frozen weights do."""
    plain = adapted(in_memory("nf4"))
    source = saved(tmp_path / "base", in_memory("nf4"))
    base = adapted(optimized(on_meta("nf4"), source, capture=capture, device_memory="2MiB"))
    x = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(1))
    base(x)
    before = zinf_compile.report(base).in_place_nbytes
    content = (source / "model.safetensors").read_bytes()
    for each in (plain, base):
        for layer in each.layers:
            layer.weight.data.bitwise_xor_(1)  # type: ignore[union-attr, operator]
    expected = (torch.compile(plain, backend="aot_eager") if capture else plain)(x)
    torch._dynamo.reset()
    assert torch.equal(base(x), expected)
    zinf_compile.synchronize(base)
    assert before > 0 == zinf_compile.report(base).in_place_nbytes
    assert torch.equal(base(x), expected)
    assert (source / "model.safetensors").read_bytes() == content


def test_state_dicts_and_checkpoints_are_those_of_a_base_in_memory(tmp_path: Path) -> None:
    plain = in_memory("nf4")
    source = saved(tmp_path / "base", plain)
    base = optimized(on_meta("nf4"), source, capture=False)
    state = plain.state_dict()
    assert list(base.state_dict()) == list(state)
    assert all(torch.equal(tensor, state[name]) for name, tensor in base.state_dict().items())
    zinf_compile.save(tmp_path / "saved", base)
    expected = bytes_of(base)
    for tensor in (tensor for found in quantised_tensors(base).values() for tensor in found.values()):
        tensor.zero_()
    assert not equal(bytes_of(base), expected)
    zinf_compile.load(tmp_path / "saved", base)
    assert equal(bytes_of(base), expected)


# What is refused, before anything has changed


def stays_on_meta(base: Base, source: Path, error: type[Exception], message: str, **options: Any) -> str:
    """Check that an error leaves a model on meta, with the same objects, and that a good checkpoint then fills it."""
    parameters, what = dict(base.named_parameters()), [(type(each), each.shape) for each in base.parameters()]
    descriptors = len(os.listdir("/proc/self/fd"))
    with pytest.raises(error, match=message) as raised:
        zinf_compile.optimize(base, init=source, **{"nvme": source.parent, "capture": False, **BUDGETS, **options})
    assert len(os.listdir("/proc/self/fd")) == descriptors
    assert all(parameters[name] is parameter for name, parameter in base.named_parameters())
    assert [(type(each), each.shape) for each in base.parameters()] == what
    assert all(parameter.is_meta for parameter in base.parameters())
    for layer in base.layers:
        assert getattr(layer, "quant_state", None) is None
        assert getattr(layer.weight, "quant_state", None) is None
        assert getattr(getattr(layer, "state", None), "CB", None) is None
    return str(raised.value)


def without(*names: str) -> Callable[[dict[str, Tensor]], None]:
    def change(state: dict[str, Tensor]) -> None:
        for name in names:
            del state[name]

    return change


def replaced(**values: Tensor) -> Callable[[dict[str, Tensor]], None]:
    return lambda state: state.update({f"layers.0.weight.{key}": value for key, value in values.items()})


def with_state(**entries: object) -> Callable[[dict[str, Tensor]], None]:
    def change(state: dict[str, Tensor]) -> None:
        name = "layers.0.weight.quant_state.bitsandbytes__nf4"
        read = json.loads(bytes(state[name].tolist())) | entries
        state[name] = torch.tensor(list(json.dumps(read).encode()), dtype=torch.uint8)

    return change


CHANGES: dict[str, tuple[Callable[[dict[str, Tensor]], None], type[Exception], str]] = {
    "codes": (without("layers.0.weight"), ConfigError, r"'layers\.0\.weight' is missing"),
    "statistics": (
        without("layers.0.weight.absmax", "layers.0.weight.nested_quant_map"),
        ConfigError,
        r"(?s)'layers\.0\.weight\.absmax' is missing.*'layers\.0\.weight\.nested_quant_map' is missing",
    ),
    "state": (
        without("layers.0.weight.quant_state.bitsandbytes__nf4"),
        ConfigError,
        r"'layers\.0\.weight\.quant_state\.bitsandbytes__nf4' is missing",
    ),
    "too few scales": (
        replaced(absmax=torch.zeros(7, dtype=torch.uint8)),
        ConfigError,
        r"'layers\.0\.weight\.absmax' is \[7\] of uint8 in model\.safetensors, and \[4096\] of uint8 of such a weight",
    ),
    "scales of another dtype": (
        replaced(nested_absmax=torch.zeros(16, dtype=torch.bfloat16)),
        ConfigError,
        r"nested_absmax' is \[16\] of bfloat16 in model\.safetensors, and \[16\] of float32 of such a weight",
    ),
    "another shape": (
        with_state(shape=[WIDTH, WIDTH // 2]),
        ConfigError,
        rf"'layers\.0\.weight' is \[{WIDTH}, {WIDTH // 2}\] in model\.safetensors, \[{WIDTH}, {WIDTH}\] in the model",
    ),
    "damage": (
        with_state(blocksize="many"),
        CheckpointError,
        r"bitsandbytes__nf4' cannot be read \(its sizes are none",
    ),
    "damaged dtype": (with_state(dtype="many"), CheckpointError, r"cannot be read \(it names no dtype\)"),
    "unknown": (
        lambda state: state.update(other=torch.zeros(2)),
        ConfigError,
        r"'other' is in model\.safetensors, and not in the model",
    ),
}


@pytest.mark.parametrize("change", CHANGES)
def test_files_that_do_not_match_are_refused_by_name(change: str, tmp_path: Path) -> None:
    edit, error, message = CHANGES[change]
    plain, base = in_memory("nf4", 2), on_meta("nf4", 2)
    stays_on_meta(base, saved(tmp_path / "base", plain, edit), error, message)
    optimized(base, saved(tmp_path / "good", plain), capture=False)
    assert equal(bytes_of(base), bytes_of(plain))


@pytest.mark.parametrize(
    ("model", "file", "message"),
    [
        ("nf4", "plain", r"'layers\.0\.weight' is nf4 in the model, and not quantised in model\.safetensors: quantise"),
        (
            "nf4",
            "fp4",
            r"'layers\.0\.weight' is nf4 in the model, and fp4 in model\.safetensors: make the model by the set",
        ),
        ("nf4", "int8", r"'layers\.1\.weight' is nf4 in the model, and int8 in model\.safetensors"),
        ("int8", "nf4", r"'layers\.0\.weight' is int8 in the model, and nf4 in model\.safetensors"),
        (
            "plain",
            "nf4",
            r"'layers\.0\.weight' is nf4 of bitsandbytes in model\.safetensors, and not quantised in the mo",
        ),
        (
            "plain",
            "int8",
            r"'layers\.0\.weight' is int8 of bitsandbytes in model\.safetensors, and not quantised in the m",
        ),
    ],
)
def test_another_quantisation_is_refused_by_name(model: str, file: str, message: str, tmp_path: Path) -> None:
    source = saved(tmp_path / "base", in_memory(file, 2))
    told = stays_on_meta(on_meta(model, 2), source, ConfigError, message)
    assert "absmax" not in told  # one line for each weight
    assert "SCB" not in told


def test_without_bitsandbytes_the_message_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zinf_compile.weights.file_values.find_spec", lambda _: None)
    source = saved(tmp_path / "base", in_memory("nf4", 2))
    stays_on_meta(on_meta("plain", 2), source, ConfigError, "install bitsandbytes, and make its layer a Linear4bit")


@pytest.mark.parametrize("kind", ["nf4", "int8"])
@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        (
            {"verify_store": True},
            UnsupportedError,
            r"init serves quantised parameters \(.*\) from files on a CPU, in one",
        ),
        ({"reserve_memory": "4MiB"}, CapacityError, "have tensors of their own: .* raise it to"),
        ({"device_memory": "64KiB", "host_memory": "64KiB"}, CapacityError, "raise"),
    ],
)
def test_what_does_not_fit_leaves_the_model_on_meta(
    kind: str, options: dict[str, Any], error: type[Exception], message: str, tmp_path: Path
) -> None:
    plain, base = in_memory(kind), on_meta(kind)
    source = saved(tmp_path / "base", plain)
    stays_on_meta(base, source, error, message, **options)
    optimized(base, source, capture=False)
    assert equal(bytes_of(base), bytes_of(plain))


def test_an_error_while_values_move_puts_them_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, base = in_memory("nf4"), on_meta("nf4")
    source = saved(tmp_path / "base", plain)

    def fail(*_: object) -> None:
        raise StoreError("no values today")

    with monkeypatch.context() as patched:
        patched.setattr("zinf_compile.weights.file_values.FileValues.fill", fail)
        stays_on_meta(base, source, StoreError, "no values today")
    optimized(base, source, capture=False)
    assert equal(bytes_of(base), bytes_of(plain))


def test_reset_and_parameters_with_values_are_refused(tmp_path: Path) -> None:
    source = saved(tmp_path / "base", in_memory("nf4", 2))
    with pytest.raises(UnsupportedError, match=r"'layers\.0\.weight' and 1 more .* no reset_parameters\(\) quantises"):
        zinf_compile.optimize(on_meta("nf4", 2), init="reset", **BUDGETS)
    with pytest.raises(UnsupportedError, match=r"which init cannot give values; load the model with its values"):
        zinf_compile.optimize(in_memory("nf4", 2), init=source, **BUDGETS)


# A model of transformers, with adapters of peft


def _llama(folder: Path, quantisation: str) -> None:
    """Save a quantised Llama as people do."""
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=96, hidden_size=256, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=512, use_cache=False, dtype="float32",
    )  # fmt: skip
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(config).save_pretrained(folder / "plain")
    four = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}
    settings = transformers.BitsAndBytesConfig(**(four if quantisation == "nf4" else {"load_in_8bit": True}))
    transformers.LlamaForCausalLM.from_pretrained(
        folder / "plain", quantization_config=settings, device_map="cpu"
    ).save_pretrained(folder / "base")


def _on_meta(folder: Path) -> Any:
    import transformers
    from transformers.quantizers import AutoHfQuantizer

    config = transformers.AutoConfig.from_pretrained(folder)
    with torch.device("meta"):
        base = transformers.AutoModelForCausalLM.from_config(config)
    quantizer = AutoHfQuantizer.from_config(config.quantization_config)
    quantizer.preprocess_model(base, device_map=None)
    quantizer.postprocess_model(base)
    return base.requires_grad_(False)


@pytest.mark.parametrize("quantisation", ["nf4", "int8"])
@pytest.mark.parametrize(
    "capture", [False, pytest.param(True, marks=[pytest.mark.long, pytest.mark.slow])], ids=["eager", "captured"]
)
def test_qlora_of_a_llama_from_its_files(quantisation: str, capture: bool, tmp_path: Path) -> None:
    """Training, saved adapters and merged logits are bitwise those of the checkpoint that transformers has loaded."""
    transformers, peft = pytest.importorskip("transformers"), pytest.importorskip("peft")
    _llama(tmp_path, quantisation)

    def with_adapters(base: nn.Module) -> Any:
        torch.manual_seed(0)
        adapters = peft.LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM")
        return peft.get_peft_model(base, adapters).train()

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
        model.save_pretrained(tmp_path / folder)
        adapters = safetensors.load_file(tmp_path / folder / "adapter_model.safetensors")
        merged = model.merge_and_unload()
        assert not any("lora" in name for name, _ in merged.named_parameters())
        with torch.no_grad():
            logits = merged.train()(input_ids=torch.arange(4, 12)[None]).logits
        return [*(adapters[name] for name in sorted(adapters)), logits]

    model = with_adapters(transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base", device_map="cpu"))
    expected = losses_of(model, torch.compile(model, backend="aot_eager") if capture else model)
    expected_merged = saved_and_merged(model, "in_memory")
    torch._dynamo.reset()
    base = optimized(_on_meta(tmp_path / "base"), tmp_path / "base", capture=capture, device_memory="3MiB")
    assert zinf_compile.report(base).in_place_nbytes > 2**17
    model = with_adapters(base)
    assert equal(losses_of(model, model), expected)
    assert equal(saved_and_merged(model, "ours"), expected_merged)
