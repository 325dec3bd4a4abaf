"""`zinf train` from its command line."""

import argparse
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import zinf_compile
from zinf_compile.cli import presets, train, training
from zinf_compile.cli.main import main
from zinf_compile.cli.optimizers import measure_state
from zinf_compile.cli.presets import PRESETS, STATE_BYTES, load_example
from zinf_compile.cli.progress import Speed
from zinf_compile.frontend.verification import InComputeDtype
from zinf_compile.ir.config import parse_size

needs_optimize = pytest.mark.skipif(not hasattr(zinf_compile, "optimize"), reason="zinf_compile.optimize is not there")


def _losses(printed: str) -> list[str]:
    return re.findall(r"^step .* loss (\d+\.\d{3})", printed, flags=re.MULTILINE)


def test_plain_training_learns(tiny: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*tiny, "--plain", "--steps", "12"]) == 0
    losses = [float(loss) for loss in _losses(capsys.readouterr().out)]
    assert len(losses) == 12
    assert 5.3 < losses[0] < 6.2  # ln 256 = 5.5
    assert losses[-1] < losses[0] - 0.5


def test_first_lines_say_what_is_trained_and_the_last_ones_a_sample(
    tiny: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*tiny, "--plain", "--steps", "1", "--sample", "5", "--prompt", "class "]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "model: a GPT of 459,392 parameters, 2 layers, hidden 128, 2 heads, vocabulary 256"
    assert lines[1].startswith(
        "model states: 7.0 MiB = 16 bytes a parameter (4 fp32 parameter + 4 fp32 gradient + 8 AdamW state)"
    )
    assert "class " in lines[lines.index("sample:") + 1]


def test_the_same_seed_prints_the_same_losses(tiny: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    printed = []
    for seed in ("1", "1", "2"):
        assert main([*tiny, "--plain", "--steps", "2", "--seed", seed]) == 0
        printed.append(_losses(capsys.readouterr().out))
    assert printed[0] == printed[1] != printed[2]


def test_params_and_clip_and_bfloat16(tiny: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--params", "200K", "--clip", "1.0", "--compute-dtype", "bfloat16"]
    assert main([*tiny, "--plain", "--steps", "2", *options]) == 0
    out = capsys.readouterr().out
    assert "a GPT of 180,672 parameters" in out
    assert len(_losses(out)) == 2


def test_the_plain_counterpart_of_a_compute_dtype_is_a_bfloat16_model() -> None:
    example = load_example(None)
    model = example.GPT(example.GPTConfig(256, 1, 64, 1, 8))
    tokens = torch.arange(8)[None]
    wrapped = InComputeDtype(model, torch.bfloat16)
    loss = wrapped(tokens, tokens)
    loss.backward()
    assert model.head.weight.grad.dtype == torch.float32
    assert torch.equal(loss, model.to(torch.bfloat16)(tokens, tokens))


@needs_optimize
def test_within_a_budget_the_losses_are_those_of_plain(
    tiny: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main([*tiny, "--plain", "--steps", "3"]) == 0
    plain = _losses(capsys.readouterr().out)
    plan = tmp_path / "plan.json"
    assert main([*tiny, "--steps", "3", "--nvme", str(tmp_path), "--save-plan", str(plan), "--sample", "2"]) == 0
    out = capsys.readouterr().out
    assert _losses(out) == plain
    assert re.search(r"the model states are \d+\.\d times the budget", out)
    assert plan.is_file()


@needs_optimize
def test_the_temporary_folder_is_gone_afterwards(
    tiny: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    if train._filesystem_of(tmp_path) == "tmpfs":
        pytest.skip("the temporary folder of the tests is in memory")
    assert main([*tiny, "--steps", "1"]) == 0
    assert list(tmp_path.iterdir()) == []


def test_ctrl_c_is_status_130(
    tiny: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(step: int, steps: int) -> float:
        raise KeyboardInterrupt

    monkeypatch.setattr(training, "_warm_up_cosine", interrupt)
    assert main([*tiny, "--plain", "--steps", "1"]) == 130
    assert capsys.readouterr().err == "zinf train: stopped; nothing is saved; with --save-every N it can be resumed\n"


def test_ctrl_c_says_how_to_resume(
    tiny: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = training.Training.run

    def interrupted(self: training.Training, *args: Any, **kwargs: Any) -> Iterator[Any]:
        for result in run(self, *args, **kwargs):
            yield result
            if result.step == 3 * (1 + (self.schedule.steps > 4)):
                raise KeyboardInterrupt

    monkeypatch.setattr(training.Training, "run", interrupted)
    words = [*tiny, "--plain", "--steps", "9", "--checkpoint", str(tmp_path / "x"), "--save-every"]
    assert main([*words, "7"]) == 130
    assert f"stopped; nothing is saved in {tmp_path / 'x'} yet; pass a smaller --save" in capsys.readouterr().err
    assert main([*words, "4"]) == 130
    stopped = f"zinf train: stopped; resume with --resume; last checkpoint: step 4 in {tmp_path / 'x'}\n"
    assert capsys.readouterr().err == stopped
    assert main([*words, "4", "--resume"]) == 130
    assert capsys.readouterr().err == stopped, "the last checkpoint must still be step 4, from which it resumed"


def test_the_speed_is_of_several_steps() -> None:
    """The slow first step, which captures, and single slow or fast steps do not affect it."""
    speed, shown = Speed(100), []
    for seconds in (50.0, 1.0, 1.1, 0.1, 20.0, 1.05):
        speed.add(seconds)
        shown.append(str(speed))
    assert shown == ["2 tokens/s", *(f"{100 / median:,.0f} tokens/s" for median in (1.0, 1.05, 1.0, 1.05, 1.05))]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--text", "/absent"], "the text /absent does not exist"),
        (["--seq", "99999999"], "lower --seq"),
        (["--steps", "0"], "--steps 0 is not a positive number"),
        (["--sample", "-1"], "--sample -1 is negative"),
        (["--sample", "1", "--prompt", ""], "--prompt is empty"),
        (["--params", "many"], "--params many is not a number of parameters"),
        (["--params", "1K"], "no GPT with a vocabulary of 256"),
        (["--device-memory", "lots"], "is not a size"),
        (["--model", "/absent.py"], "the model file /absent.py does not exist"),
        (["--model", __file__], "has no GPT, GPTConfig"),
        (["--tokenizer", "/absent.json"], "the tokenizer file /absent.json does not exist"),
        (["--plain", "--save-plan", "plan.json"], "nothing to save with --plain"),
        (["--accumulate", "0"], "--accumulate 0 is not a positive number"),
        (["--clip", "nan"], "--clip nan is not a positive number"),
        (["--save-every", "-1"], "--save-every -1 is not a positive number"),
        (["--lora", "0"], "--lora 0 is not a positive number"),
        (["--lora", "4"], "as in zinf train hf:llama --lora 8"),
        (["--optimizer", "adamx"], "choose one of Adafactor, "),
        (["--optimizer", "lbfgs"], "use AdamW, or another"),
        (["--optimizer", "muon", "--plain"], "Muon cannot train this model: Muon only supports 2D parameters"),
        (["--lr", "-1"], "Invalid learning rate: -1.0; change --lr"),
        (["--plain", "--device-memory", "1GiB", "--nvme", "."], "--device-memory, --nvme means nothing with --plain"),
        (["--plain", "--state-dtype", "int8"], "--state-dtype means nothing with --plain"),
        (["--plain", "--compute", "inductor"], "--compute means nothing with --plain"),
    ],
)
def test_wrong_input_is_one_sentence_and_status_2(
    refused: Callable[..., None], options: list[str], message: str
) -> None:
    refused(message, *options)


def test_without_the_examples_folder_the_message_says_to_pass_model(
    tiny: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(presets, "_EXAMPLE", tmp_path / "gpt.py")
    assert main([*tiny, "--plain"]) == 2
    assert "pass --model" in capsys.readouterr().err


def test_a_folder_in_memory_is_refused(
    tiny: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(train, "_filesystem_of", lambda folder: "tmpfs")
    assert main([*tiny, "--steps", "1"]) == 2
    assert "pass --nvme with a folder on a disk" in capsys.readouterr().err


def test_float16_is_not_offered(tiny: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main([*tiny, "--compute-dtype", "float16"])
    assert stopped.value.code == 2


@pytest.mark.parametrize("name", ["demo", "small", "medium", "large"])
def test_model_states_of_a_preset_are_four_times_its_budget(name: str) -> None:
    example, preset = load_example(None), PRESETS[name]
    config = example.GPTConfig(256, preset.layers, preset.hidden, preset.hidden // 64, preset.seq)
    per_parameter = sum(STATE_BYTES[preset.compute_dtype].values()) + measure_state(torch.optim.AdamW, preset.lr)
    states = example.num_parameters(config) * per_parameter
    budget = parse_size(preset.device_memory, option="device") + parse_size(preset.host_memory, option="host")
    assert states >= 4 * budget


def test_help_needs_no_torch() -> None:
    script = "import sys; from zinf_compile.cli.main import main\ntry: main(['--help'])\nexcept SystemExit: pass\n"
    out = subprocess.run([sys.executable, "-c", script + "assert 'torch' not in sys.modules"], capture_output=True)
    assert out.returncode == 0, out.stderr.decode()
    assert all(command in out.stdout.decode() for command in ("train", "show", "diff"))


@pytest.mark.parametrize(
    ("given", "reserve"),
    [({}, 0), ({"device_memory": "512MiB"}, "auto"), ({"host_memory": "1GiB", "reserve_memory": "64MiB"}, "64MiB")],
)
def test_budgets_of_presets_are_for_the_model_and_stated_ones_for_the_process(
    given: dict[str, str], reserve: object
) -> None:
    names = ("seq", "batch", "steps", "lr", "compute_dtype", "device_memory", "host_memory", "reserve_memory")
    args = argparse.Namespace(**{**dict.fromkeys(names), **given})
    train._fill_from_preset(args, PRESETS["demo"])
    assert args.reserve_memory == reserve
    assert args.host_memory == given.get("host_memory", PRESETS["demo"].host_memory)


@pytest.mark.parametrize(
    ("preset", "asked", "is_fast", "chosen"),
    [
        ("demo", None, True, "bfloat16"),
        ("demo", None, False, "float32"),
        ("demo", "bfloat16", False, "bfloat16"),
        ("tiny", None, False, "float32"),
    ],
)
def test_a_preset_computes_in_bfloat16_where_the_processor_does_so_fast(
    preset: str, asked: str | None, is_fast: bool, chosen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(train, "has_fast_bfloat16", lambda: is_fast)
    names = ("seq", "batch", "steps", "lr", "device_memory", "host_memory", "reserve_memory")
    args = argparse.Namespace(**dict.fromkeys(names), compute_dtype=asked)
    train._fill_from_preset(args, PRESETS[preset])
    assert args.compute_dtype == chosen
    assert args.avoids_bfloat16 == (preset == "demo" and asked is None and not is_fast)
