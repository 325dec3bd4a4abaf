"""`zinf plan`: exit codes, what is printed and saved, and models that cannot be loaded."""

import json
import re
import sys
from pathlib import Path

import pytest

from zinf_compile.cli.main import main
from zinf_compile.ir.copies import Role
from zinf_compile.ir.glossary import Tier
from zinf_compile.ir.plan_io import load_plan, plan_from_json
from zinf_compile.passes.planner.simulator.simulate import simulate

GPT = ["plan", "gpt", "--layers", "1", "--hidden", "64", "--heads", "2", "--batch", "2", "--seq", "16", "--vocab", "64"]
MODULE = """
import torch

def good():
    return torch.nn.Linear(4096, 4096), torch.zeros(8, 4096)

def huge():
    return torch.nn.Linear(10**6, 10**6), torch.zeros(8, 10**6)

def only_model():
    return torch.nn.Linear(4, 4)

def three():
    return 1, 2, 3

def fails():
    return {}["nothing"]

def unfit():
    return torch.nn.Linear(4, 4), torch.zeros(8, 5)
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return the name of a user's module in the current folder."""
    name = f"planned_{tmp_path.name}"
    (tmp_path / f"{name}.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [*sys.path])  # restored later: the command appends the folder
    return name


def test_a_gpt_that_fits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "plan.json"
    assert main([*GPT, "--hardware", "h200", "--device-memory", "1GiB", "--save", str(path)]) == 0
    printed = capsys.readouterr()
    plan = load_plan(path)
    assert printed.out.startswith("plan v10  GPT graph 0  training")
    assert printed.err == ""
    assert plan.hardware.name == "h200"
    assert plan.tiers[0].capacity == 2**30


def test_many_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*GPT, "--hardware", "dgx2", "--world", "32", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["num_ranks"], document["hardware"]["num_nodes"]) == (32, 2)
    assert main([*GPT, "--hardware", "dgx2", "--world", "32", "--replicas", "4", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["num_ranks"], document["num_replicas"], document["hardware"]["num_nodes"]) == (8, 4, 2)
    assert main([*GPT, "--hardware", "dgx2", "--world", "32", "--replicas", "5"]) == 2
    assert "32 ranks do not make 5 replicas of equally many ranks" in capsys.readouterr().err
    assert main([*GPT, "--hardware", "dgx2", "--world", "20"]) == 2
    assert "20 ranks do not fill whole nodes of dgx2" in capsys.readouterr().err


def test_tensor_parallel_ranks_and_stages(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    words = [
        *GPT,
        "--layers",
        "4",
        "--hardware",
        "dgx2",
        "--world",
        "32",
        "--tp",
        "2",
        "--pp",
        "4",
        "--accumulate",
        "32",
    ]
    assert main([*words, "--stage", "1"]) == 0
    printed = capsys.readouterr().out
    assert "  of one of 32 ranks on 2 nodes: 4 stages x 4 data-parallel x 2 tensor-parallel\n" in printed
    assert re.search(r"(?m)^stage +blocks +params +open +batch +update +device +host +nvme$", printed)
    assert re.search(r"(?m)^  1 to 2 +1 +0\.0 M +3 ", printed)
    assert re.search(r"(?m)^step of \S+ \w+, 8 micro-batches, on stage \d +time +share$", printed)
    assert re.search(r"(?m)^  the bubble of the pipeline +\S+ \w+ +\d+%$", printed)
    assert re.search(r"(?m)^  [\d,]+ tokens/s of all ranks$", printed)
    assert re.search(r"(?m)^  \S+ TFLOP/s of each, with what is recomputed$", printed)
    assert re.search(r"(?m)^  bound by ", printed)
    assert " a micro-batch" in printed.splitlines()[-1]
    assert main([*words, "--json"]) == 0
    pipeline = json.loads(capsys.readouterr().out)["pipeline"]
    assert (pipeline["num_micro_batches"], [stage["num_stages"] for stage in pipeline["stages"]]) == (8, [1, 2, 1])


def test_ranks_that_work_in_rounds(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    words = [*GPT, "--layers", "2", "--hardware", "8xrtx4090", "--world", "2", "--schedule", "rounds"]
    assert main(words) == 0
    printed = capsys.readouterr().out
    assert "  of one of 2 ranks on 1 node, which has stages of the model, and computes them\n" in printed
    assert re.search(r"(?m)^rank +stages +params +open +passes +update +device +host +nvme$", printed)
    assert re.search(r"(?m)^step of \S+ \w+, 2 batches in rounds, on rank \d +time +share$", printed)
    *_, compute, compared = printed.splitlines()
    assert " a step" in compute
    assert re.fullmatch(
        r"a step takes \S+ \w+ in rounds, and \S+ \w+ with ZeRO stage 3: (rounds are|stage 3 is) \d+\.\d\d times as fast",
        compared,
    )
    assert main([*words, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["num_ranks"], document["pipeline"]["schedule"]) == (1, "rounds")
    assert main([*words, "--tp", "2"]) == 2
    assert "schedule='rounds' does not go with tp=2" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["--world", "6", "--tp", "2", "--pp", "2"],
            "a world of 6 ranks is not divided by tp=2 times pp=2, which is 4",
        ),
        (["--world", "4", "--tp", "4"], "4 tensor-parallel ranks do not divide the 2 heads of blocks.0.attention.out"),
        (
            ["--world", "2", "--pp", "2"],
            "2 pipeline stages need at least as many identical blocks, and GPT has 1 alike",
        ),
        (
            ["--accumulate", "2", "--what-to-buy"],
            "is of one micro-batch of one stage, which does not answer for the whole",
        ),
    ],
)
def test_meshes_that_do_not_fit(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*GPT, "--hardware", "dgx2", *words]) == 2
    assert message in capsys.readouterr().err


def test_how_ranks_reduce(capsys: pytest.CaptureFixture[str]) -> None:
    seconds = []
    for reduce in ("ordered", "fast"):
        words = ["--hardware", "dgx2", "--world", "16", "--replicas", "16", "--reduce", reduce, "--json"]
        assert main([*GPT, *words]) == 0
        plan = plan_from_json(capsys.readouterr().out)
        seconds.append(simulate(plan).step_seconds)
    assert seconds[1] < seconds[0]  # one all-reduce in a ring, and not one hop after the other


def test_questions(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--hardware", "laptop-16g", "--device-memory", "64MiB", "--tokens-to-hide-disk"]
    assert main([*GPT, *words, "--what-to-buy", "--price", "disk=90", "--price", "ram=4"]) == 0
    printed = capsys.readouterr().out
    assert "with 16 tokens a step the disk is hidden behind compute" in printed  # nothing is on it
    table = printed[printed.index("bought for a rank") :].splitlines()
    assert re.match(r"bought for a rank +step +saved +price +saved per 1,000$", table[0])
    assert re.match(r" +as it is +\S+ \w+$", table[1])
    assert re.search(r"(?m)a second disk beside the first +\S+ \w+ +nothing +90$", printed)
    assert re.search(r"(?m)a processor that is twice as fast +\S+ \w+ +\S+ \w+$", printed)
    assert main([*GPT, *words[:-1], "--what-to-buy"]) == 0
    assert re.search(r"bought for a rank +step +saved$", capsys.readouterr().out, re.MULTILINE)


def test_what_to_buy_for_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--hardware", "rtx4090", "--device-memory", "1GiB", "--host-memory", "1GiB", "--what-to-buy"]
    assert main([*GPT, *words, "--price", "device_memory=0.5"]) == 0
    printed = capsys.readouterr().out
    assert re.search(r"(?m)^  1\.00 GiB more on the device .* 0\.5$", printed)
    for what in (
        "1.00 GiB more RAM",
        "a second disk",
        "a device that is twice as fast",
        "a link between host and device",
    ):
        assert f"\n  {what} " in printed


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--price", "ram=4"], "--price is for --what-to-buy"),
        (["--what-to-buy", "--price", "ram"], "--price ram is not NAME=PRICE, such as ram=4"),
        (["--what-to-buy", "--price", "rma=4"], "a price list does not know 'rma'; did you mean 'ram'"),
        (["--what-to-buy", "--json"], "--json prints the plan alone"),
        (["--nvme-write-budget", "2TB"], "nvme_write_budget='2TB' is not bytes per day"),
    ],
)
def test_questions_that_make_no_sense(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*GPT, "--hardware", "laptop-16g", *words]) == 2
    assert message in capsys.readouterr().err


def test_a_plan_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*GPT, "--hardware", "laptop-16g", "--inference", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert [run["phase"] for run in document["schedule"]["runs"]] == ["forward"]


def test_what_does_not_fit_is_1_with_what_would(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*GPT, "--inference", "--hardware", "h200", "--device-memory", "16KiB"]) == 1
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "zinf plan: it does not fit: GPT graph 0 needs" in printed.err
    assert "raise device_memory to 1MiB" in printed.err


@pytest.mark.parametrize(("function", "status"), [("good", 0), ("huge", 1)])
def test_a_function_of_the_user(module: str, function: str, status: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", f"{module}:{function}", "--hardware", "rtx4090"]) == status
    assert ("Linear graph 0" in capsys.readouterr().out) == (status == 0)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("only_model", "only_model returned Linear; it has to return a torch.nn.Module and what that is called with"),
        ("three", "three returned a tuple of (int, int, int); it has to return"),
        ("fails", "fails failed: KeyError at "),
        ("godo", "has no function 'godo'; did you mean"),
        ("unfit", "Linear cannot be called with such inputs"),
    ],
)
def test_a_function_that_fails_or_returns_something_else(
    module: str, function: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", f"{module}:{function}", "--hardware", "h200"]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["gpt", "--layers", "2"], "gpt needs --hidden, --heads"),
        (
            ["gpt", "--layers", "2", "--hidden", "65", "--heads", "2"],
            "--hidden must be divisible by --heads, ",
        ),
        (["gpt", "--layers", "0", "--hidden", "64", "--heads", "2"], "--layers must be at least 1, and is 0"),
        (["bert"], "bert is no model; give gpt, hf:PATH"),
        (["no_such_module:make"], "no_such_module cannot be imported: ModuleNotFoundError"),
        (["hf:nowhere"], "no config.json found at nowhere"),
        (["hf:nowhere", "--layers", "2"], "--layers cannot be given"),
    ],
)
def test_what_is_no_model(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *words, "--hardware", "h200"]) == 2
    assert message in capsys.readouterr().err


def test_unknown_hardware(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*GPT, "--hardware", "h2000"]) == 2
    assert "no hardware profile 'h2000'" in capsys.readouterr().err


def test_both_ways_to_compute(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*GPT, "--hardware", "h200", "--compute", "inductor"]) == 0
    said = re.search(
        r"compiled segments, (\S+) (\w+) a step; op by op it would take (\S+) (\w+)$", capsys.readouterr().out.strip()
    )
    assert said is not None
    fused, unit, op_by_op, other = said.groups()
    assert unit == other
    assert float(fused) < float(op_by_op)
    assert main([*GPT, "--hardware", "h200", "--compute", "aten"]) == 0
    assert f"computes op by op, {op_by_op} {unit} a step" in capsys.readouterr().out


def test_a_transformers_config(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2,
        architectures=["LlamaForCausalLM"],
    )  # fmt: skip
    config.save_pretrained(tmp_path)
    words = ["plan", f"hf:{tmp_path / 'config.json'}", "--batch", "2", "--seq", "16", "--hardware", "h200"]
    assert main([*words, "--compute-dtype", "bfloat16"]) == 0
    assert "LlamaForCausalLM graph 0  training\n  compute in bfloat16" in capsys.readouterr().out


def test_states_stay_on_a_device_that_has_room(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Parameters and optimizer state, so that the device updates all of them; the rest is named with its reason."""
    path = tmp_path / "plan.json"
    sizes = ["--layers", "2", "--hidden", "256", "--heads", "4"]
    assert main(["plan", "gpt", *sizes, "--hardware", "h200", "--save", str(path)]) == 0
    plan = load_plan(path)
    for role in (Role.COMPUTE, Role.STATE):
        assert {copy.tier for item in plan.placements for copy in item.by_role[role]} == {Tier.DEVICE}
    assert not plan.gathers
    assert plan.step.device_share == 1.0
    printed = " ".join(capsys.readouterr().out.split())
    assert "of the device stay unused: master copies and gradients, 208.3 MiB, live in host memory" in printed
    assert "bound by updates" not in printed
