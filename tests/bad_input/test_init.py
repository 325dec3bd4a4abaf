"""Initial values that cannot be provided: the error lists everything that is wrong, and the model stays as it was."""

import json
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import zinf_compile
from zinf_compile.ir.errors import CapacityError, CheckpointError, ConfigError, StoreError, UnsupportedError
from zinf_compile.weights import weight_files

StaysPlain = Callable[[nn.Module], AbstractContextManager[None]]
BUDGETS: dict[str, Any] = {"device_memory": "8MiB", "host_memory": "8MiB", "capture": False}


class Scale(nn.Module):
    """A parameter and a buffer, without ``reset_parameters``."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(200))
        self.register_buffer("mask", torch.ones(3), persistent=False)


class HalfReset(nn.Linear):
    def reset_parameters(self) -> None:
        nn.init.ones_(self.weight)


class FailingReset(nn.Linear):
    def reset_parameters(self) -> None:
        super().reset_parameters()
        if not self.weight.is_meta:
            raise RuntimeError("no numbers today")


def on_meta(*modules: Callable[[], nn.Module]) -> nn.Sequential:
    with torch.device("meta"):
        return nn.Sequential(*(module() for module in modules))


def linear() -> nn.Module:
    return nn.Linear(200, 200)


def refused(model: nn.Module, init: object, error: type[Exception], message: str, stays: StaysPlain) -> str:
    buffers = dict(model.named_buffers())
    with stays(model), pytest.raises(error, match=message) as raised:
        zinf_compile.optimize(model, init=init, **BUDGETS)  # type: ignore[arg-type]
    for name, buffer in model.named_buffers():
        assert buffer is buffers[name], name
    assert all(module._parameters.keys() == dict(module.named_parameters(recurse=False)).keys() for module in model)
    return str(raised.value)


@pytest.mark.parametrize("init", [3, True, {}, [], [1], {"reset": 1}, torch.ones(2)])
def test_what_is_no_source(init: object, model: nn.Module) -> None:
    refused(model, init, ConfigError, r"init=.* is neither 'reset' nor a safetensors file", nullcontext)


def test_reset_of_a_model_with_values(model: nn.Module, stays_plain: StaysPlain) -> None:
    refused(model, "reset", ConfigError, "init='reset' is for a model on the meta device", stays_plain)


def test_modules_that_cannot_reset_are_all_named(stays_plain: StaysPlain) -> None:
    model = on_meta(linear, Scale, Scale)
    message = r"nothing in Sequential gives a value to 1\.scale, 2\.scale, 1\.mask, 2\.mask, which are on meta"
    refused(model, "reset", ConfigError, message, stays_plain)


def test_a_reset_that_leaves_something_out(stays_plain: StaysPlain) -> None:
    model = on_meta(linear, lambda: HalfReset(200, 200))
    refused(
        model, "reset", ConfigError, r"nothing in Sequential gives a value to 1\.bias, which are on meta", stays_plain
    )
    zinf_compile.close(zinf_compile.optimize(on_meta(linear), init="reset", **BUDGETS))


def test_a_reset_that_fails(stays_plain: StaysPlain) -> None:
    """After the failure the same model can be initialised in another way, and trains."""
    model = on_meta(linear, nn.Tanh, lambda: nn.BatchNorm1d(200), lambda: FailingReset(200, 200))
    refused(model, "reset", RuntimeError, "no numbers today", stays_plain)
    model[3] = on_meta(linear)[0]
    zinf_compile.optimize(model, init="reset", **BUDGETS)
    optimizer = torch.optim.SGD(model.parameters())
    model(torch.randn(4, 200)).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    optimizer.step()
    zinf_compile.close(model)


def test_a_module_larger_than_the_device_budget(tmp_path: Path, stays_plain: StaysPlain) -> None:
    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weights = nn.ParameterList(nn.Parameter(torch.empty(512, 512)) for _ in range(6))
            for index, weight in enumerate(self.weights):
                self.register_parameter(f"weight_{index}", weight)

        def reset_parameters(self) -> None:
            for weight in self.parameters(recurse=False):
                weight.data.normal_()

    model = on_meta(Pair)
    model[0].weights = nn.ParameterList()
    message = r"initialising '0' takes 6.0 MiB of parameters into memory at once, .* raise device_memory to 6MiB"
    budgets = {"device_memory": "4MiB", "host_memory": "512KiB", "nvme": tmp_path, "capture": False}
    with stays_plain(model), pytest.raises(CapacityError, match=message):
        zinf_compile.optimize(model, init="reset", **budgets)
    zinf_compile.close(zinf_compile.optimize(model, init="reset", **{**budgets, "device_memory": "6MiB"}))


def test_a_model_with_weak_references(stays_plain: StaysPlain) -> None:
    model = on_meta(lambda: nn.LSTM(8, 8))
    refused(model, "reset", UnsupportedError, r"weak references to 0\.weight_ih_l0, .* build that module", stays_plain)


def test_everything_that_does_not_fit_a_file_is_told_at_once(tmp_path: Path, stays_plain: StaysPlain) -> None:
    model = on_meta(linear, Scale, lambda: nn.BatchNorm1d(200))
    tensors = {
        "0.weight": torch.ones(200, 100),
        "0.bias": torch.ones(200),
        "2.weight": torch.ones(200),
        "x": torch.ones(1),
    }
    save_file(tensors, tmp_path / "model.safetensors")
    message = refused(model, tmp_path, ConfigError, f"Sequential cannot be filled from {tmp_path}", stays_plain)
    assert message.splitlines()[1:] == [
        "  '0.weight' is [200, 100] in model.safetensors, [200, 200] in the model",
        "  '1.scale' is missing",
        "  '2.bias' is missing",
        "  '2.running_mean' is missing",
        "  '2.running_var' is missing",
        "  '2.num_batches_tracked' is missing",
        "  'x' is in model.safetensors, and not in the model",
        "  '1.mask' is on meta, and neither in a state dict nor made by a reset_parameters() of its module",
    ]


def write_model(folder: Path) -> tuple[Path, dict[str, torch.Tensor]]:
    tensors = {"0.weight": torch.randn(200, 200), "0.bias": torch.randn(200)}
    save_file(tensors, folder / "model.safetensors")
    return folder / "model.safetensors", tensors


def test_damaged_files(tmp_path: Path, stays_plain: StaysPlain) -> None:
    model = on_meta(linear)
    path, _ = write_model(tmp_path)
    whole = path.read_bytes()
    with stays_plain(model):
        for damaged in (whole[:-1], whole + b"0", whole[:20], b"", whole[:8] + b"x" + whole[9:]):
            path.write_bytes(damaged)
            refused(model, path, CheckpointError, rf"{path} is damaged", nullcontext)
        path.unlink()
        refused(model, tmp_path, ConfigError, r"has neither model\.safetensors\.index\.json nor", nullcontext)
        refused(model, path, ConfigError, r"there is no file or folder '.*model\.safetensors'", nullcontext)
        refused(model, "rest", ConfigError, "there is no file or folder 'rest' .* say 'reset'", nullcontext)


def test_damaged_indices(tmp_path: Path) -> None:
    model = on_meta(linear)
    path, tensors = write_model(tmp_path)
    index = tmp_path / "model.safetensors.index.json"
    good = dict.fromkeys(tensors, path.name)
    for text, error, message in (
        ("{", CheckpointError, "it is not JSON"),
        ("[]", CheckpointError, "it has no weight_map"),
        (json.dumps({"weight_map": {"0.weight": 3}}), CheckpointError, "it has no weight_map"),
        (
            json.dumps({"weight_map": {**good, "1.weight": path.name}}),
            CheckpointError,
            r"promises '1\.weight' in model",
        ),
        (json.dumps({"weight_map": {"0.weight": "other.safetensors"}}), ConfigError, r"there is no file .*other\.safe"),
    ):
        index.write_text(text)
        refused(model, tmp_path, error, message, nullcontext)
    index.write_text(json.dumps({"weight_map": good}))
    zinf_compile.close(zinf_compile.optimize(model, init=tmp_path, **BUDGETS))


def test_a_tensor_in_two_files(tmp_path: Path, stays_plain: StaysPlain) -> None:
    model = on_meta(linear)
    path, tensors = write_model(tmp_path)
    save_file(tensors, tmp_path / "again.safetensors")
    files = [path, tmp_path / "again.safetensors"]
    refused(model, files, CheckpointError, r"'0\.\w+' is both in .*model\.safetensors and in .*again", stays_plain)


def test_a_file_that_is_cut_while_it_is_read(
    tmp_path: Path, stays_plain: StaysPlain, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = on_meta(linear)
    path, tensors = write_model(tmp_path)
    found = weight_files.find_tensors

    def cut(source: object) -> object:
        layout = found(path)
        path.write_bytes(path.read_bytes()[:-1000])
        return layout

    monkeypatch.setattr("zinf_compile.weights.file_values.find_tensors", cut)
    refused(model, path, StoreError, r"reading '0\.\w+' from .* failed: the file ended at byte \d+", stays_plain)
    save_file(tensors, path)
    monkeypatch.undo()
    zinf_compile.optimize(model, init=path, **BUDGETS)
    assert torch.equal(model[0].weight, tensors["0.weight"])
    zinf_compile.close(model)
