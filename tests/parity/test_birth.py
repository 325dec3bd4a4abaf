"""Models initialised in their store, from meta or from files: same values and same training as when built in memory."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import zinf_compile
from examples.gpt import GPT, GPTConfig

transformers = pytest.importorskip("transformers")

TOKENS = [{"tokens": tokens[:, :-1], "targets": tokens[:, 1:]} for tokens in torch.randint(64, (3, 2, 9)).unbind()]
IDS = [{"input_ids": batch["tokens"], "labels": batch["tokens"]} for batch in TOKENS]
VECTORS = [{"x": torch.randn(4, 24)} for _ in range(3)]
IMAGES = [{"x": torch.randn(4, 3, 8, 8)} for _ in range(3)]


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(24, 48), nn.LayerNorm(48), nn.GELU(), nn.Linear(48, 24, bias=False))

    def forward(self, x: Tensor) -> Tensor:
        return (self.body(x) - x).square().mean()


class ConvNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.convolution, self.norm = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.convolution(x)).relu().mean((2, 3))).logsumexp(-1).sum()


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(24, 2, add_bias_kv=True)
        self.embed = nn.Embedding(10, 24, padding_idx=0)

    def forward(self, x: Tensor) -> Tensor:
        return (self.attention(x, x, x)[0] + self.embed(torch.arange(4))).square().mean()


class Applied(nn.Module):
    """Initialises itself by ``apply``, as nanoGPT and many others do, with frozen and tied parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(24, 24), nn.Linear(24, 24)
        self.head.weight = self.embed.weight
        self.base = nn.Linear(24, 24).requires_grad_(False)
        self.apply(self._init_weights)

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.orthogonal_(module.weight) if not module.weight.is_meta else None
            module.bias.data.fill_(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return F.gelu(self.head(self.base(x))).square().mean() + self.embed.weight.sum()


def gpt() -> nn.Module:
    return GPT(GPTConfig(vocab_size=64, layers=2, hidden=32, heads=2, seq=8), seed=5)


def gpt_tied() -> nn.Module:
    return GPT(GPTConfig(vocab_size=64, layers=2, hidden=32, heads=2, seq=8), tied=True, seed=5)


def llama(**options: Any) -> nn.Module:
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=48, use_cache=False,
        max_position_embeddings=16, **options,
    )  # fmt: skip
    return transformers.AutoModelForCausalLM.from_config(config)


def llama_tied() -> nn.Module:
    return llama(tie_word_embeddings=True)


def mixtral() -> nn.Module:
    config = transformers.MixtralConfig(
        vocab_size=64, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1,
        intermediate_size=32, num_local_experts=4, use_cache=False, max_position_embeddings=16,
    )  # fmt: skip
    return transformers.AutoModelForCausalLM.from_config(config)


MODELS = [
    (MLP, VECTORS),
    (ConvNet, IMAGES),
    (Attention, VECTORS),
    (Applied, VECTORS),
    (gpt, TOKENS),
    (gpt_tied, TOKENS),
    (llama, IDS),
    (llama_tied, IDS),
    (mixtral, IDS),
]
models = pytest.mark.parametrize(("build", "batches"), MODELS, ids=[build.__name__ for build, _ in MODELS])
Build = Callable[[], nn.Module]


def on_meta(build: Build) -> nn.Module:
    with torch.device("meta"):
        return build()


def assert_same_tensors(parity: Any, ours: nn.Module, plain: nn.Module) -> None:
    """Compare all parameters and buffers, including non-persistent buffers."""
    for kind in ("named_parameters", "named_buffers"):
        found = dict(getattr(ours, kind)(remove_duplicate=False))
        expected = dict(getattr(plain, kind)(remove_duplicate=False))
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            parity.assert_equal(found[name].data, value.data, name)
            assert found[name].requires_grad == value.requires_grad


@pytest.fixture
def options(tmp_path: Path) -> dict[str, Any]:
    return {"device_memory": "4MiB", "host_memory": "512KiB", "nvme": tmp_path, "capture": False}


@models
def test_reset_gives_the_numbers_of_building_in_memory(
    parity: Any, options: dict[str, Any], build: Build, batches: Sequence[dict[str, Tensor]]
) -> None:
    torch.manual_seed(11)
    plain = build()
    drawn = torch.get_rng_state()
    model = on_meta(build)
    registered = list(model.parameters())
    torch.manual_seed(11)
    parity.optimize(model, init="reset", **options)
    assert torch.equal(torch.get_rng_state(), drawn)
    assert all(now is was for now, was in zip(model.parameters(), registered, strict=True))
    if isinstance(model, GPT):  # whose __init__ ends with this call
        model.init_weights(5)
    assert_same_tensors(parity, model, plain)
    parity.assert_same(parity.train(model, batches), parity.train(plain, batches))


@models
def test_files_give_their_values(
    parity: Any, options: dict[str, Any], tmp_path: Path, build: Build, batches: Sequence[dict[str, Tensor]]
) -> None:
    """Export one model; load the files into a meta model, and over the values of a third."""
    plain = build()
    zinf_compile.export(plain, tmp_path / "weights", max_shard_size="20KB")
    for model in (on_meta(build), build()):
        drawn = torch.get_rng_state()
        parity.optimize(model, init=tmp_path / "weights", **options)
        assert torch.equal(torch.get_rng_state(), drawn)
        assert_same_tensors(parity, model, plain)
    parity.assert_same(parity.train(model, batches), parity.train(plain, batches))


@pytest.mark.parametrize("init", ["reset", "files"])
def test_captured_and_in_another_compute_dtype(parity: Any, options: dict[str, Any], tmp_path: Path, init: str) -> None:
    """Compare with a model that is built in memory and optimized alike; other tests compare that one with plain PyTorch."""
    torch.manual_seed(11)
    built = MLP()
    source: object = init
    if init == "files":
        source = tmp_path / "weights"
        zinf_compile.export(built, tmp_path / "weights")
    model = on_meta(MLP)
    torch.manual_seed(11)
    options |= {"capture": True, "compute_dtype": torch.bfloat16}
    parity.optimize(model, init=source, **options)
    parity.optimize(built, **options)
    batches = [{"x": batch["x"].bfloat16()} for batch in VECTORS]
    parity.assert_same(parity.train(model, batches), parity.train(built, batches))


def test_a_frozen_parameter_is_initialised_in_its_own_dtype(parity: Any, options: dict[str, Any]) -> None:
    torch.manual_seed(11)
    plain = Applied()
    model = on_meta(Applied)
    torch.manual_seed(11)
    parity.optimize(model, init="reset", compute_dtype=torch.bfloat16, **options)
    parity.assert_equal(model.base.weight.data, plain.base.weight.data.bfloat16(), "base.weight")
    parity.assert_equal(model.head.weight.data, plain.head.weight.data, "head.weight")


@pytest.mark.parametrize("placement", ["nvme", "host", "mixed"])
def test_a_model_born_in_any_home(parity: Any, tmp_path: Path, placement: str) -> None:
    budgets = parity.budgets(lambda: (llama(), IDS), placement, captured=False)
    budgets["device_memory"] = max(budgets["device_memory"], 2**14)  # to train, an integrated device needs none
    torch.manual_seed(11)
    plain, model = llama(), on_meta(llama)
    torch.manual_seed(11)
    parity.optimize(model, init="reset", capture=False, **budgets)
    assert_same_tensors(parity, model, plain)


def test_an_optimizer_from_before(parity: Any, options: dict[str, Any]) -> None:
    """An optimizer made for the meta model trains it: parameters stay the same objects."""
    torch.manual_seed(11)
    plain, model = MLP(), on_meta(MLP)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    torch.manual_seed(11)
    parity.optimize(model, init="reset", **options)
    ours = parity.train(model, VECTORS, make_optimizer=lambda _: optimizer)
    parity.assert_same(ours, parity.train(plain, VECTORS))


def test_files_in_another_dtype(parity: Any, options: dict[str, Any], tmp_path: Path) -> None:
    plain = MLP()
    zinf_compile.export(plain, tmp_path / "weights", dtype=torch.bfloat16)
    model = parity.optimize(on_meta(MLP), init=tmp_path / "weights" / "model.safetensors", **options)
    assert_same_tensors(parity, model, plain.bfloat16().float())


def test_a_list_of_files(parity: Any, options: dict[str, Any], tmp_path: Path) -> None:
    plain = llama()
    plain.save_pretrained(tmp_path / "weights", max_shard_size="20KB")  # written by transformers
    files = sorted((tmp_path / "weights").glob("*.safetensors"))
    assert len(files) > 2
    assert_same_tensors(parity, parity.optimize(on_meta(llama), init=files, **options), plain)
