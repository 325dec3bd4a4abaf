"""On a GPU every bit is that of plain PyTorch there, within the budget, whatever streams do at the same time."""

import sys
import zlib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import zinf_compile
from tests.support.gpus import Gpu
from zinf_compile.ir.copies import LEAST_CODED, Code
from zinf_compile.ir.glossary import Tier
from zinf_compile.runtime.storage.state_codes import decode, encode

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
from gpt import GPT, GPTConfig

MIB = 2**20
ROUNDING = {"aten": 1e-5, "inductor": 1e-4}  # of losses after a few steps of Adam. Inductor reorders sums


@pytest.fixture(autouse=True)
def _deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def make_gpt() -> GPT:
    return GPT(GPTConfig(vocab_size=2048, layers=4, hidden=256, heads=4, seq=128), seed=0)


def train(
    gpu: Gpu,
    model: Any,
    called: Any,
    *,
    clip: bool = False,
    after_step: Callable[[torch.optim.Optimizer], None] = lambda _: None,
) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Return the losses and the parameters at the end, on the CPU."""
    generator = torch.Generator().manual_seed(1)
    adamw = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for _ in range(gpu.steps):
        tokens = gpu.put(torch.randint(2048, (gpu.batch, 129), generator=generator))
        loss = called(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())
        loss.backward()
        if clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        adamw.step()
        after_step(adamw)
        adamw.zero_grad()
        losses.append(loss.detach().cpu())
    return losses, {name: parameter.detach().cpu().clone() for name, parameter in model.named_parameters()}


BUDGETS = {
    "resident": {"device_memory": "512MiB", "host_memory": "1GiB"},
    "host": {"device_memory": "64MiB", "host_memory": "1GiB"},
    "nvme": {"device_memory": "64MiB", "host_memory": "24MiB"},
}


@pytest.mark.parametrize("placement", sorted(BUDGETS))
def test_bitwise_within_the_budget(gpu: Gpu, placement: str, tmp_path: Path) -> None:
    plain = gpu.put(make_gpt())
    expected = train(gpu, plain, torch.compile(plain, backend="aot_eager"))
    del plain
    torch._dynamo.reset()
    torch.cuda.empty_cache()
    model = zinf_compile.optimize(
        make_gpt(), device="cuda", nvme=tmp_path, compute="aten", tiles=False, **BUDGETS[placement]
    )
    before = gpu.forget_peak()
    losses, parameters = train(gpu, model, model)
    peak = gpu.peak - before
    report = zinf_compile.report(model)
    device = next(tier for tier in report.tiers if tier.tier is Tier.DEVICE)
    store = next(model.parameters())._zinf_record.store
    refusal = store.memory.refusal
    zinf_compile.close(model)
    for ours, theirs in zip(losses, expected[0], strict=True):
        assert torch.equal(ours, theirs)
    for name, theirs in expected[1].items():
        assert torch.equal(parameters[name], theirs), name
    assert device.measured_peak <= device.predicted_peak, report
    assert peak <= device.predicted_peak + 32 * MIB, "what inputs take, and what libraries keep"
    assert report.allocator is not None
    assert report.allocator.measured_peak <= report.allocator.limit, report
    assert refusal is None, f"host memory is not pinned: {refusal}"


def round_state(code: Code, model: torch.nn.Module, adamw: torch.optim.Optimizer) -> None:
    """Do to the moments of a plain optimizer what storing them does, on the CPU."""
    for name, parameter in model.named_parameters():
        state = adamw.state[parameter]
        for key in ("exp_avg", "exp_avg_sq") if parameter.numel() >= LEAST_CODED else ():
            values = state[key].cpu().view(-1)
            pages = torch.empty(code.nbytes(values.numel()), dtype=torch.uint8)
            seed = zlib.crc32(f"{name}/{key}/{float(state['step']) - 1}".encode())
            encode(code, values, pages, seed=seed, drawn_from=parameter.detach().cpu().view(-1))
            decode(code, pages, values)
            state[key].copy_(values.view(parameter.shape))


@pytest.mark.parametrize("placement", sorted(BUDGETS))
@pytest.mark.parametrize("code", Code)
def test_state_in_codes_is_rounded_as_on_a_cpu(gpu: Gpu, code: Code, placement: str, tmp_path: Path) -> None:
    plain = gpu.put(make_gpt())
    rounds = partial(round_state, code, plain)
    expected = train(gpu, plain, torch.compile(plain, backend="aot_eager"), after_step=rounds)
    del plain, rounds
    torch._dynamo.reset()
    torch.cuda.empty_cache()
    options = {"compute": "aten", "tiles": False, "state_dtype": code, "update_on": "device"}
    model = zinf_compile.optimize(make_gpt(), device="cuda", nvme=tmp_path, **options, **BUDGETS[placement])
    losses, parameters = train(gpu, model, model)
    report = zinf_compile.report(model)
    device = next(tier for tier in report.tiers if tier.tier is Tier.DEVICE)
    zinf_compile.close(model)
    for ours, theirs in zip(losses, expected[0], strict=True):
        assert torch.equal(ours, theirs)
    for name, theirs in expected[1].items():
        assert torch.equal(parameters[name], theirs), name
    assert device.measured_peak <= device.predicted_peak, report


def test_updates_on_the_host_agree_to_rounding(gpu: Gpu, compute: str, tmp_path: Path) -> None:
    plain = gpu.put(make_gpt())
    expected, _ = train(gpu, plain, torch.compile(plain, backend="aot_eager"), clip=True)
    torch._dynamo.reset()
    model = zinf_compile.optimize(
        make_gpt(), device="cuda", compute=compute, nvme=tmp_path, tiles=False, update_on="host", **BUDGETS["nvme"]
    )
    losses, _ = train(gpu, model, model, clip=True)
    zinf_compile.close(model)
    for ours, theirs in zip(losses, expected, strict=True):  # Adam's quotient is rounded otherwise on a CPU
        torch.testing.assert_close(ours, theirs, rtol=ROUNDING[compute], atol=ROUNDING[compute])


def train_in_half_precision(
    gpu: Gpu, model: Any, called: Any, *, scale: float, clips: bool, **options: Any
) -> tuple[list[Tensor], list[Tensor]]:
    """Return the losses, and the parameters at the end, of training in float16 with a gradient scaler."""
    generator = torch.Generator().manual_seed(1)
    adamw = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-3, **options)  # rounding is not amplified
    scaler = torch.amp.GradScaler(gpu.kind, init_scale=scale)
    losses = []
    for _ in range(gpu.steps):
        tokens = gpu.put(torch.randint(2048, (gpu.batch, 129), generator=generator))
        with torch.autocast(gpu.kind, dtype=torch.float16):
            loss = called(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())
        scaler.scale(loss).backward()
        if clips:
            scaler.unscale_(adamw)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        scaler.step(adamw)
        scaler.update()
        adamw.zero_grad()
        losses.append(loss.detach().cpu())
    return losses, [parameter.detach().cpu().clone() for parameter in model.parameters()]


@pytest.mark.parametrize("update_on", ["host", "device"])
@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("scale", [2.0**10, 2.0**40], ids=["fits", "overflows"])
@pytest.mark.parametrize("clips", [False, True])
def test_gradient_scaler(gpu: Gpu, fused: bool, scale: float, update_on: str, *, clips: bool) -> None:
    """A scale of 2**40 overflows float16 at every step, and all steps are skipped."""
    plain = gpu.put(make_gpt())
    expected, wanted = train_in_half_precision(
        gpu, plain, torch.compile(plain, backend="aot_eager"), scale=scale, clips=clips, fused=fused
    )
    torch._dynamo.reset()
    model = zinf_compile.optimize(
        make_gpt(), device="cuda", compute="aten", tiles=False, update_on=update_on, **BUDGETS["host"]
    )
    losses, parameters = train_in_half_precision(gpu, model, model, scale=scale, clips=clips, fused=fused)
    zinf_compile.close(model)
    for ours, theirs in zip(losses, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
    for ours, theirs in zip(parameters, wanted, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("options", [{"capturable": True}, {"foreach": False}, {"fused": True}], ids=str)
def test_options_of_adamw(gpu: Gpu, options: dict[str, bool], compute: str) -> None:
    if "capturable" in options:
        gpu.must_be_real("torch takes capturable for tensors of a GPU only")

    def run(model: Any, called: Any) -> list[Tensor]:
        adamw = torch.optim.AdamW(model.parameters(), lr=1e-3, **options)
        generator = torch.Generator().manual_seed(1)
        losses = []
        for _ in range(gpu.steps):
            tokens = gpu.put(torch.randint(2048, (gpu.batch, 129), generator=generator))
            loss = called(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())
            loss.backward()
            adamw.step()
            adamw.zero_grad()
            losses.append(loss.detach().cpu())
        return losses

    plain = gpu.put(make_gpt())
    expected = run(plain, torch.compile(plain, backend="aot_eager"))
    torch._dynamo.reset()
    model = zinf_compile.optimize(make_gpt(), device="cuda", compute=compute, tiles=False, **BUDGETS["host"])
    for ours, theirs in zip(run(model, model), expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=ROUNDING[compute], atol=ROUNDING[compute])
    assert not zinf_compile.report(model).fallbacks
    zinf_compile.close(model)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_llama_whose_queries_share_keys(gpu: Gpu, dtype: torch.dtype, compute: str) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=2048, hidden_size=512, intermediate_size=1024, num_hidden_layers=4, num_attention_heads=8,
        num_key_value_heads=2,
    )  # fmt: skip

    def make() -> Any:
        torch.manual_seed(0)
        return transformers.LlamaForCausalLM(config).to(dtype)

    def run(model: Any) -> list[Tensor]:
        sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        generator = torch.Generator().manual_seed(1)
        losses = []
        for _ in range(gpu.steps):
            tokens = gpu.put(torch.randint(2048, (min(2, gpu.batch), 256), generator=generator))
            loss = model(input_ids=tokens, labels=tokens).loss
            loss.backward()
            sgd.step()
            sgd.zero_grad()
            losses.append(loss.detach().cpu())
        return losses

    expected = run(gpu.put(make()))
    model = zinf_compile.optimize(
        make(), device="cuda", compute=compute, tiles=False, device_memory="96MiB", host_memory="1GiB"
    )
    losses = run(model)
    assert not zinf_compile.report(model).fallbacks
    zinf_compile.close(model)
    tolerance = 1e-5 if dtype is torch.float32 else 1e-2
    for ours, theirs in zip(losses, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=0.0)


def test_eager_gathers_leave_no_limit_on_memory(gpu: Gpu) -> None:
    model = zinf_compile.optimize(make_gpt(), device="cuda", **BUDGETS["host"])
    before = gpu.limit
    for parameter in model.parameters():
        parameter.detach().sum()
    assert gpu.limit == before
    zinf_compile.close(model)


def test_a_limit_of_the_user_stays(gpu: Gpu) -> None:
    gpu.must_be_real("the limit is one of torch's allocator for CUDA")
    torch.cuda.set_per_process_memory_fraction(0.5)
    try:
        model = zinf_compile.optimize(make_gpt(), device="cuda", **BUDGETS["host"])
        train(gpu, model, model)
        zinf_compile.close(model)
        assert gpu.limit == 0.5
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


def test_what_streams_did_is_recorded(gpu: Gpu, compute: str, tmp_path: Path) -> None:
    options = {"compute": compute, "tiles": False}
    model = zinf_compile.optimize(make_gpt(), device="cuda", nvme=tmp_path, **options, **BUDGETS["host"])
    train(gpu, model, model)
    with zinf_compile.record(model) as recording:
        train(gpu, model, model)
    zinf_compile.close(model)
    lanes = {event.lane for event in recording.events}
    assert {"compute", "host -> device", "device -> host"} <= lanes
    assert all(event.end_seconds >= event.start_seconds for event in recording.events)


def test_inputs_that_were_left_on_the_cpu(gpu: Gpu) -> None:
    gpu.must_be_real("the tensors of the tests' own are on the CPU")
    model = zinf_compile.optimize(make_gpt(), device="cuda", **BUDGETS["resident"])
    with pytest.raises(zinf_compile.ConfigError, match="is on cpu, and the model computes on cuda:0"):
        model(torch.zeros(1, 8, dtype=torch.long))
    zinf_compile.close(model)
