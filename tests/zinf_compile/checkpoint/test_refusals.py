"""Wrong arguments, other models and damaged files raise the right message, and nothing changes."""

import dataclasses
import fcntl
import json
import os
import random
import re
import shutil
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import zinf_compile
from zinf_compile.checkpoint import load as load_module
from zinf_compile.checkpoint.checkpoint_folder import read_manifest
from zinf_compile.ir.errors import CapacityError, CheckpointError, ConfigError, StoreError, UnsupportedError


def contents(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> dict[str, object]:
    """Return copies of everything that ``load`` may change."""
    values: dict[str, object] = {name: value.clone() for name, value in model.state_dict().items()}
    values |= {f"{name}.grad": p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    values["random"] = torch.get_rng_state()
    if optimizer is not None:
        state = optimizer.state_dict()
        values["groups"] = str(state["param_groups"])
        values |= {f"{i}/{k}": v.clone() for i, entry in state["state"].items() for k, v in entry.items()}
    return values


def assert_unchanged(before: dict[str, object], model: nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
    after = contents(model, optimizer)
    assert before.keys() == after.keys()
    for name, value in before.items():
        assert torch.equal(value, after[name]) if isinstance(value, Tensor) else value == after[name], name  # type: ignore[arg-type]


@pytest.fixture
def saved(make: Callable, tmp_path: Path) -> Path:
    model, optimizer = make()
    zinf_compile.save(tmp_path / "saved", model, optimizer, extra=[1, "two", (3.0, None)])
    return tmp_path / "saved"


def data_of(folder: Path) -> Path:
    (data,) = folder.glob("data-*")
    return data


def refuse(
    folder: Path, made: tuple[nn.Module, torch.optim.Optimizer | None], error: type[Exception], match: str
) -> str:
    model, optimizer = made
    before = contents(model, optimizer)
    with pytest.raises(error, match=match) as caught:
        zinf_compile.load(folder, model, optimizer)
    assert_unchanged(before, model, optimizer)
    return str(caught.value)


@pytest.mark.parametrize("stored", [False, True])
def test_another_model(make: Callable, saved: Path, stored: bool) -> None:
    """Every difference is listed."""
    message = refuse(
        saved, make(stored=stored, width=70), ConfigError, "is not one of this Sequential and its optimizer"
    )
    assert "nothing was loaded. 7 differences:" in message
    for line in (
        "'0.weight' is (67, 65) float32 in the checkpoint, (70, 65) float32 here",
        "'0.bias' is (67,) float32 in the checkpoint, (70,) float32 here",
        "'1.running_var' is (67,) float32 in the checkpoint, (70,) float32 here",
        "'3.weight' is (65, 67) float32 in the checkpoint, (65, 70) float32 here",
    ):
        assert f"\n  {line}" in message


def test_missing_and_unexpected(saved: Path) -> None:
    model = nn.Sequential(nn.Linear(65, 67), nn.Tanh(), nn.Linear(67, 65, bias=False, dtype=torch.float64))
    message = refuse(
        saved, (model, torch.optim.SGD(reversed(list(model.parameters())))), ConfigError, "not one of this"
    )
    assert re.findall(r"^  .*", message, re.MULTILINE) == [
        "  missing in the checkpoint: '2.weight', (65, 67) float64",
        "  not in this model: '1.num_batches_tracked', () int64",
        "  not in this model: '1.weight', (67,) float32",
        "  not in this model: '1.bias', (67,) float32",
        "  not in this model: '3.weight', (65, 67) float32",
        "  not in this model: '3.bias', (65,) float32",
        "  not in this model: '1.running_mean', (67,) float32",
        "  not in this model: '1.running_var', (67,) float32",
        "  the optimizer is AdamW in the checkpoint, SGD here",
        "  in parameter group 0 of the checkpoint, and not here: '1.weight'",
        "  in parameter group 0 of the checkpoint, and not here: '1.bias'",
        "  in parameter group 0 of the checkpoint, and not here: '3.weight'",
        "  in parameter group 0 of the checkpoint, and not here: '3.bias'",
        "  in parameter group 0 here, and not in the checkpoint: '2.weight'",
        "  state for a parameter that is in no group here: '1.bias'",
        "  state for a parameter that is in no group here: '1.weight'",
        "  state for a parameter that is in no group here: '3.bias'",
        "  state for a parameter that is in no group here: '3.weight'",
    ]


def test_other_groups(make: Callable, saved: Path) -> None:
    model, _ = make(stored=False)
    weights, biases = [model[0].weight, model[3].weight], [model[0].bias, model[3].bias, *model[1].parameters()]
    optimizer = torch.optim.AdamW([{"params": weights}, {"params": biases}])
    refuse(saved, (model, optimizer), ConfigError, "\n  1 parameter groups in the checkpoint, 2 here$")
    optimizer = torch.optim.AdamW(reversed(list(model.parameters())))
    refuse(saved, (model, optimizer), ConfigError, "parameter group 0 has the same parameters in another order")


def test_one_side_has_no_optimizer(make: Callable, saved: Path, tmp_path: Path) -> None:
    model, optimizer = make()
    refuse(saved, (model, None), ConfigError, "holds the state of AdamW: give the optimizer as well")
    zinf_compile.save(tmp_path / "bare", model)
    refuse(tmp_path / "bare", (model, optimizer), ConfigError, "was saved without an optimizer")
    assert zinf_compile.load(tmp_path / "bare", model) is None


def test_a_pending_gradient_that_has_no_place(make: Callable, tmp_path: Path) -> None:
    model, optimizer = make(stored=False)
    model(torch.randn(3, 65)).sum().backward()
    zinf_compile.save(tmp_path / "pending", model, optimizer)
    other, other_optimizer = make(stored=False)
    zinf_compile.optimize(other, device_memory="8MiB", host_memory="8MiB", compute_dtype=torch.bfloat16, capture=False)
    message = r"\n  the gradient of '0.weight' is \(67, 65\) float32 in the checkpoint, \(67, 65\) bfloat16 here"
    refuse(tmp_path / "pending", (other, other_optimizer), ConfigError, message)
    zinf_compile.close(other)


@pytest.mark.parametrize("stored", [False, True])
@pytest.mark.parametrize("file", ["model.safetensors", "optimizer.safetensors", "gradients.safetensors", "objects.pt"])
def test_one_changed_bit_anywhere(make: Callable, tmp_path: Path, file: str, stored: bool) -> None:
    model, optimizer = make(stored=stored)
    model(torch.randn(3, 65)).sum().backward()
    zinf_compile.save(tmp_path / "saved", model, optimizer)
    path = data_of(tmp_path / "saved") / file
    whole = path.read_bytes()
    for position in [*range(0, len(whole), len(whole) // 7), len(whole) - 1]:
        damaged = bytearray(whole)
        damaged[position] ^= 16
        path.write_bytes(damaged)
        padding = file != "objects.pt" and damaged[8:4096].rstrip() == whole[8:4096].rstrip()
        if padding and position < 4096:
            continue
        message = refuse(tmp_path / "saved", (model, optimizer), CheckpointError, "is damaged")
        assert str(path) in message
        assert position < 4096 or file == "objects.pt" or re.search(r"the checksum of '[\w./]+' is", message)
    path.write_bytes(whole)
    zinf_compile.load(tmp_path / "saved", model, optimizer)


def test_the_damaged_tensor_is_named(make: Callable, saved: Path) -> None:
    path = data_of(saved) / "optimizer.safetensors"
    content = bytearray(path.read_bytes())
    content[-5] ^= 1
    path.write_bytes(content)
    message = r"optimizer\.safetensors is damaged: the checksum of '3\.bias/exp_avg_sq' is [0-9a-f]{8} and should be"
    refuse(saved, make(), CheckpointError, message)


@pytest.mark.parametrize("stored", [False, True])
def test_damage_between_the_two_looks(
    make: Callable, saved: Path, stored: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Checksums are compared again while a file is read. A half-loaded model refuses to run until it is loaded again."""
    model, optimizer = make(stored=stored)
    path = data_of(saved) / "optimizer.safetensors"
    whole = path.read_bytes()
    path.write_bytes(whole[:-5] + bytes([whole[-5] ^ 1]) + whole[-4:])
    with monkeypatch.context() as patch:
        patch.setattr(load_module, "_verify", lambda *arguments: None)
        with pytest.raises(CheckpointError, match=r"the checksum of '3\.bias/exp_avg_sq' is") as caught:
            zinf_compile.load(saved, model, optimizer)
    assert "a part of the checkpoint was loaded already" in caught.value.__notes__[-1]
    if stored:
        with pytest.raises(StoreError, match=r"holds neither its old nor its new value; load a checkpoint"):
            model[0].weight.norm()
        with pytest.raises(
            StoreError, match=r"an earlier error stopped this model: CheckpointError: .* load a checkpoint"
        ):
            zinf_compile.save(saved, model, optimizer)
    path.write_bytes(whole)
    zinf_compile.load(saved, model, optimizer)
    other, other_optimizer = make(stored=False)
    zinf_compile.load(saved, other, other_optimizer)
    assert_unchanged(contents(model, optimizer), other, other_optimizer)


def test_models_that_share_budgets(make: Callable, tmp_path: Path) -> None:
    """Each is saved and loaded separately. After a failed step they can continue once both are loaded."""
    model, optimizer = make()
    critic = zinf_compile.optimize(nn.Linear(65, 300), share=model)
    critic_optimizer = torch.optim.SGD(critic.parameters(), lr=0.1)
    zinf_compile.save(tmp_path / "model", model, optimizer)
    zinf_compile.save(tmp_path / "critic", critic, critic_optimizer)
    start = contents(model.eval(), optimizer)
    critic(torch.ones(3, 65)).sum().backward()
    critic_optimizer.step()
    zinf_compile.load(tmp_path / "critic", critic, critic_optimizer)
    assert_unchanged(start, model, optimizer)

    class Stubborn(torch.optim.SGD):
        def step(self, closure: object = None) -> None:  # type: ignore[override]
            for parameter in self.param_groups[0]["params"]:
                if parameter.shape == (300, 65) and not parameter.is_meta:  # not where it is tried
                    raise KeyboardInterrupt

    critic(torch.ones(3, 65)).sum().backward()
    with pytest.raises(KeyboardInterrupt):
        Stubborn(critic.parameters()).step()
    for folder, made in (("critic", (critic, critic_optimizer)), ("model", (model, optimizer))):
        with pytest.raises(StoreError, match="models that share budgets need one each"):
            model(torch.ones(3, 65))
        zinf_compile.load(tmp_path / folder, *made)
    model(torch.ones(3, 65))
    assert_unchanged(start, model, optimizer)


@pytest.mark.parametrize("file", ["model.safetensors", "optimizer.safetensors", "objects.pt"])
def test_files_cut_or_gone(make: Callable, saved: Path, file: str) -> None:
    path = data_of(saved) / file
    os.truncate(path, path.stat().st_size - 1)
    refuse(saved, make(), CheckpointError, f"{file} is damaged")
    path.unlink()
    refuse(saved, make(), CheckpointError, f"{file} cannot be read: No such file or directory")


def test_a_file_of_another_checkpoint(make: Callable, saved: Path, tmp_path: Path) -> None:
    other, optimizer = make(width=70)
    zinf_compile.save(tmp_path / "other", other, optimizer)
    shutil.copy(data_of(tmp_path / "other") / "model.safetensors", data_of(saved))
    refuse(saved, make(), CheckpointError, "does not hold what the manifest says")


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda text: text[:-9], "is damaged"),
        (lambda text: "[]", "is damaged"),
        (lambda text: text.replace('"data-1"', '"../x"'), "is damaged .'../x' is no data folder"),
        (lambda text: text.replace('"crc32"', '"crc33"'), "is damaged"),
        (
            lambda text: re.sub(r'"crc32": \d+', '"crc32": "x"', text),
            "is damaged .a size or a checksum in it is no whole",
        ),
        (lambda text: re.sub(r'"objects_crc32": \d+', '"objects_crc32": -1', text), "is damaged"),
        (lambda text: text.replace('"name": "0.weight"', '"name": null'), "is damaged .a name in it is no text"),
        (lambda text: text.replace('"data-1"', f'"data-{"1" * 5000}"'), "is damaged"),
        (lambda text: "[" * 10**6, "is damaged"),
        (
            lambda text: text.replace('"version": 1', '"version": 9'),
            "is of version 9, and this zinf_compile reads versions 1 and 2",
        ),
    ],
)
def test_manifests_that_make_no_sense(edit: Callable[[str], str], message: str, make: Callable, saved: Path) -> None:
    """Not detected by a checksum: older manifests have none, and an attacker can compute a matching one."""
    path = saved / "manifest.json"
    path.write_text(edit(re.sub(r',\s*"manifest_crc32": \d+', "", path.read_text())))
    made = make()
    refuse(saved, made, CheckpointError, re.escape(str(path)) + " " + message)
    with pytest.raises(CheckpointError, match=message):  # nor does a save replace it: the user may still need it
        zinf_compile.save(saved, *made)


def test_any_flip_in_a_manifest_is_damage(saved: Path) -> None:
    """The message does not blame another model, version or folder."""
    path = saved / "manifest.json"
    whole, content = read_manifest(saved), path.read_bytes()
    bits = random.Random(0)
    for position in range(0, len(content), 4):
        flipped = bytearray(content)
        flipped[position] ^= 1 << bits.randrange(8)
        path.write_bytes(flipped)
        try:
            assert read_manifest(saved) == whole, position  # white space
        except CheckpointError as error:
            assert "manifest.json is damaged" in str(error)  # noqa: PT017
    path.write_text(re.sub(r',\s*"manifest_crc32": \d+', "", content.decode()))
    assert read_manifest(saved) == whole, "a manifest from before checksums must load"


def forge(folder: Path, **changes: object) -> None:
    """Change the objects of a checkpoint and update its checksums."""
    path = data_of(folder) / "objects.pt"
    torch.save(torch.load(path) | changes, path)
    manifest = read_manifest(folder)
    assert manifest is not None
    manifest = dataclasses.replace(manifest, objects_crc32=zlib.crc32(path.read_bytes()))
    (folder / "manifest.json").write_text(manifest.dump())


@pytest.mark.parametrize("stored", [False, True])
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"options": [{"params": []}]}, r"option 'params' of parameter group 0 is \[\], which is not of the kind"),
        ({"options": [{"lr": "boo"}]}, "option 'lr' of parameter group 0 is 'boo', which is not of the kind"),
        ({"options": [{"lr": torch.zeros(2)}]}, "option 'lr' of parameter group 0"),
        ({"options": [{"betas": (0.9,)}]}, "option 'betas' of parameter group 0"),
        ({"options": [{"maximize": 3.0}]}, "option 'maximize' of parameter group 0"),
        ({"options": {"lr": 1.0}}, "cannot be read .its options are no list"),
        ({"options": [[1]]}, "cannot be read .its options and states are not dicts"),
        ({"options": [{1: 1}]}, "cannot be read .an option has no name"),
        ({"states": {"0.weight": {"exp_avg": torch.zeros(3)}}}, "cannot be read .a state is a tensor"),
        ({"states": [1]}, "cannot be read .its states are no dict"),
        ({"modules": {1: 2}}, "cannot be read .a state has no name"),
        ({"random_state": torch.zeros(3)}, "cannot be read"),
        ({"random_state": torch.zeros(5056, dtype=torch.uint8)}, "cannot be read"),
        ({"random_state": None}, "cannot be read"),
        ({"device_random_state": 3}, "cannot be read .its random state of the device is none"),
        ({"more": 1}, "cannot be read"),
    ],
)
def test_forged_objects(make: Callable, saved: Path, stored: bool, changes: dict[str, object], message: str) -> None:
    """All objects are checked before anything changes."""
    forge(saved, **changes)
    refuse(saved, make(stored=stored), CheckpointError, r"objects\.pt .*" + message)


def test_objects_that_would_grow(make: Callable, saved: Path) -> None:
    path = data_of(saved) / "objects.pt"
    with zipfile.ZipFile(path) as archive:
        entries = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in entries.items():
            archive.writestr(name, content)
    manifest = read_manifest(saved)
    assert manifest is not None
    manifest = dataclasses.replace(manifest, objects_crc32=zlib.crc32(path.read_bytes()))
    (saved / "manifest.json").write_text(manifest.dump())
    refuse(saved, make(), CheckpointError, r"objects\.pt cannot be read .it is compressed")


def test_options_of_another_form_are_taken(make: Callable, saved: Path) -> None:
    """A learning rate that is a tensor, missing options, and options that only a scheduler adds."""
    options = {"lr": torch.tensor(0.5), "betas": [0.5, 0.75], "foreach": False, "initial_lr": 0.5, "maximize": None}
    forge(saved, options=[options])
    model, optimizer = make()
    zinf_compile.load(saved, model, optimizer)
    assert {name: optimizer.param_groups[0][name] for name in options} == options


def test_a_module_refuses_its_state(tmp_path: Path) -> None:
    """Only the module can check its extra state. Modules loaded before it get theirs back, and no tensor has changed."""

    class Counts(nn.Linear):
        count = 0

        def get_extra_state(self) -> int:
            return self.count

        def set_extra_state(self, state: int) -> None:
            if state == 7:
                raise ValueError("seven")
            self.count = state

    model = nn.Sequential(Counts(2, 2), Counts(2, 2))
    model[0].count, model[1].count = 5, 7
    zinf_compile.save(tmp_path / "x", model)
    model[0].count, model[1].count = 1, 2
    before = {name: value.clone() for name, value in model.named_parameters()}
    for parameter in model.parameters():
        parameter.data.add_(1)
    with pytest.raises(ValueError, match="seven"):
        zinf_compile.load(tmp_path / "x", model)
    assert (model[0].count, model[1].count) == (1, 2)
    assert all(torch.equal(value, before[name] + 1) for name, value in model.named_parameters())


def test_a_gradient_of_nobody(make: Callable, tmp_path: Path) -> None:
    model, optimizer = make(stored=False)
    model(torch.randn(3, 65)).sum().backward()
    zinf_compile.save(tmp_path / "pending", model, optimizer)
    content = data_of(tmp_path / "pending") / "gradients.safetensors"
    content.write_bytes(content.read_bytes().replace(b'"3.bias"', b'"3.xxxx"'))
    manifest = read_manifest(tmp_path / "pending")
    assert manifest is not None
    tensors = (
        dataclasses.replace(tensor, name="3.xxxx") if (tensor.file, tensor.name) == (content.name, "3.bias") else tensor
        for tensor in manifest.tensors
    )
    manifest = dataclasses.replace(manifest, tensors=tuple(tensors))
    (tmp_path / "pending" / "manifest.json").write_text(manifest.dump())
    message = "has a gradient in the checkpoint, and is not in this model: '3.xxxx'"
    refuse(tmp_path / "pending", (model, optimizer), ConfigError, message)


def test_no_checkpoint(make: Callable, tmp_path: Path) -> None:
    refuse(tmp_path / "nowhere", make(), ConfigError, "there is no checkpoint in '.*nowhere': it is no folder")
    refuse(tmp_path, make(), ConfigError, "there is no checkpoint in '.*': it has no manifest")


def test_wrong_arguments(make: Callable, tmp_path: Path) -> None:
    model, optimizer = make(stored=False)
    other, _ = make(stored=False)
    with pytest.raises(ConfigError, match=r"takes a torch\.nn\.Module, not AdamW"):
        zinf_compile.save(tmp_path / "x", optimizer, model)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"takes a torch\.optim\.Optimizer, not dict"):
        zinf_compile.save(tmp_path / "x", model, {})  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="6 parameters of the optimizer are not in this Sequential"):
        zinf_compile.save(tmp_path / "x", other, optimizer)
    with pytest.raises(ConfigError, match="loading it is safe: it must be made of numbers"):
        zinf_compile.save(tmp_path / "x", model, optimizer, extra=model)
    with pytest.raises(ConfigError, match="loading it is safe: it must be made of numbers"):
        zinf_compile.save(tmp_path / "x", model, optimizer, extra=lambda: 3)
    assert not (tmp_path / "x").exists()
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"cannot save to '.*file': File exists"):
        zinf_compile.save(tmp_path / "file", model, optimizer)


def test_tensors_that_no_file_holds(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match=r"weight is a torch\.strided tensor on meta"):
        zinf_compile.save(tmp_path / "x", nn.Linear(2, 2, device="meta"))
    with pytest.raises(UnsupportedError, match=r"'weight' is torch\.complex128"):
        zinf_compile.save(tmp_path / "x", nn.Linear(2, 2, dtype=torch.complex128))
    assert not (tmp_path / "x").exists()


def test_a_closed_model(make: Callable, saved: Path) -> None:
    model, optimizer = make()
    zinf_compile.close(model)
    closed = "the store of this model is closed; build and optimize the model again"
    refuse(saved, (model, optimizer), StoreError, closed)
    with pytest.raises(StoreError, match=closed):
        zinf_compile.save(saved, model, optimizer)
    model[0].weight.grad = torch.zeros(67, 65)
    with pytest.raises(StoreError, match=closed):
        optimizer.step()


def test_inside_of_full_parameters(make: Callable, saved: Path) -> None:
    model, optimizer = make()
    with zinf_compile.full_parameters(model):
        held = r"'0\.weight' is held by full_parameters\(\)"
        with pytest.raises(UnsupportedError, match=held):
            zinf_compile.save(saved, model, optimizer)
        with pytest.raises(UnsupportedError, match=held):
            zinf_compile.load(saved, model, optimizer)
    with zinf_compile.full_parameters(model[0]), pytest.raises(UnsupportedError, match=held):
        zinf_compile.load(saved, model, optimizer)
    zinf_compile.load(saved, model, optimizer)


def test_a_full_disk(make: Callable, saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = make()
    before = (saved / "manifest.json").read_text()
    real = os.statvfs(saved)
    fields = list(real)
    fields[4] = 1  # f_bavail
    with monkeypatch.context() as patch:
        patch.setattr(os, "statvfs", lambda path: os.statvfs_result(fields))
        with pytest.raises(
            CapacityError, match=r"this checkpoint needs 1\d\d\.\d KiB in '.*saved', beside .* free some space"
        ):
            zinf_compile.save(saved, *made)
    assert (saved / "manifest.json").read_text() == before
    assert [path.name for path in saved.glob("data-*")] == ["data-1"]
    assert zinf_compile.load(saved, *made) == [1, "two", (3.0, None)]


class FailsAt:
    """Wraps a system call so that its ``at``-th call fails."""

    def __init__(self, call: Callable, at: int) -> None:
        self._call, self._at, self.num_calls = call, at, 0

    def __call__(self, *args: object, **kwargs: object) -> object:
        self.num_calls += 1
        if self.num_calls == self._at:
            raise OSError(5, "Input/output error")
        return self._call(*args, **kwargs)


def test_a_write_that_fails(make: Callable, saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each call fails in turn: the existing checkpoint stays complete, and no files are left over."""
    made = make()
    plain, last = contents(*made), [1, "two", (3.0, None)]
    for name in ("pwritev", "fsync", "ftruncate", "replace", "posix_fallocate"):
        for at in range(1, 20):
            with monkeypatch.context() as patch:
                fails = FailsAt(getattr(os, name), at)
                patch.setattr(os, name, fails)
                try:
                    zinf_compile.save(saved, *made, extra=(name, at))
                except (StoreError, ConfigError) as error:
                    assert "Input/output error" in str(error)  # noqa: PT017
                else:
                    assert fails.num_calls < at
                    last = (name, at)
                    break
            extra = zinf_compile.load(saved, *made)
            is_replaced = extra == (name, at)  # the rename has already happened
            assert is_replaced == (name == "fsync" and len(list(saved.glob("data-*"))) == 2)
            assert is_replaced or extra == last
            assert_unchanged(plain, *made)
            last = extra
        else:
            pytest.fail(f"{name} is called more than 19 times")


def test_two_at_once(make: Callable, saved: Path) -> None:
    made = make()
    descriptor = os.open(saved, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH)
        zinf_compile.load(saved, *made)
        with pytest.raises(ConfigError, match="is being saved to or loaded from by somebody else"):
            zinf_compile.save(saved, *made)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        with pytest.raises(ConfigError, match="is being saved to or loaded from by somebody else"):
            zinf_compile.load(saved, *made)
    finally:
        os.close(descriptor)


def listed(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def test_what_is_not_ours_stays(make: Callable, saved: Path, tmp_path: Path) -> None:
    """Whatever their names: a folder without our marker, a copy of our folder, links, and other files in our folder."""
    made = make()
    for name in ("data-2024", "data-mine", "elsewhere"):
        (saved / name).mkdir()
        (saved / name / "model.safetensors").write_text("mine")
    (saved / "manifest.json.new").write_text("mine")
    (saved / "data-2").symlink_to("elsewhere")
    (saved / "data-3").symlink_to("nowhere")
    (saved / "data-4").write_text("mine")
    shutil.copytree(saved / "data-1", saved / "data-77")
    (saved / "data-1" / "thesis.csv").write_text("mine")
    before = set(listed(saved))
    zinf_compile.save(saved, *made)
    gone = {
        f"data-1/{name}" for name in (".zinf-made-this", "model.safetensors", "objects.pt", "optimizer.safetensors")
    }
    assert before - set(listed(saved)) == gone
    assert json.loads((saved / "manifest.json").read_text())["data_folder"] == "data-5", "a name that was unused"
    zinf_compile.save(saved, *made)
    new = {f"data-6/{Path(name).name}" for name in gone} | {"data-6"}
    assert set(listed(saved)) == before - gone | new
    zinf_compile.load(saved, *made)


def test_only_what_a_save_has_marked_is_a_leftover(make: Callable, saved: Path) -> None:
    """Being listed by a killed save is not enough: names outside, links and others' folders are not touched."""
    made = make()
    outside = saved.parent / "data-8"
    shutil.copytree(saved / "data-1", outside)
    shutil.copytree(saved / "data-1", saved / "data-8")
    shutil.copytree(saved / "data-1", saved / "data-9")
    identity = json.loads((outside / ".zinf-made-this").read_text())["identity"]
    (saved / "data-7").symlink_to(outside)
    own = {"data-7": identity, "data-8": identity, "data-9": "of another", "../data-8": identity, "data-10": [identity]}
    (saved / ".zinf-saving.json").write_text(json.dumps(own))
    zinf_compile.save(saved, *made)
    assert sorted(os.listdir(saved)) == ["data-2", "data-7", "data-9", "manifest.json"]
    assert len(os.listdir(outside)) == len(os.listdir(saved / "data-9")) == 4


def test_a_checkpoint_without_a_marker(make: Callable, saved: Path) -> None:
    """A checkpoint from before markers loads, and the next save removes the data folder that its manifest names."""
    made = make()
    (saved / "data-1" / ".zinf-made-this").unlink()
    zinf_compile.load(saved, *made)
    zinf_compile.save(saved, *made)
    assert sorted(os.listdir(saved)) == ["data-2", "manifest.json"]


@pytest.mark.parametrize("name", ["manifest.json", "data-1", "data-1/objects.pt", "data-1/model.safetensors"])
def test_links_and_fifos_in_a_checkpoint(make: Callable, saved: Path, tmp_path: Path, name: str) -> None:
    """They are refused, and a FIFO does not block."""
    made, path = make(), saved / name
    path.rename(tmp_path / "moved")
    path.symlink_to(tmp_path / "moved")
    refuse(saved, made, CheckpointError, re.escape(str(path)) + " .*is a symbolic link")
    if name != "data-1":
        path.unlink()
        os.mkfifo(path)
        refuse(saved, made, CheckpointError, re.escape(str(path)) + " cannot be read: it is a FIFO, not a regular file")
