"""Options that cannot be used: each is refused by name, and the model stays as it was."""

import errno
import os
import re
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
import torch
from torch import nn

import zinf_compile
from zinf_compile.ir.errors import CapacityError, ConfigError, ZinfError
from zinf_compile.runtime.storage.nvme.posix import PosixEngine

StaysPlain = Callable[[nn.Module], AbstractContextManager[None]]

BAD_OPTIONS: list[tuple[dict[str, object], type[ZinfError], str]] = [
    ({"host_mem": "1GiB"}, ConfigError, r"unknown option 'host_mem'; did you mean 'host_memory'\?"),
    ({"device_memroy": 1}, ConfigError, r"unknown option 'device_memroy'; did you mean 'device_memory'\?"),
    ({"nvme_path": "/tmp"}, ConfigError, r"unknown option 'nvme_path'; did you mean 'nvme"),
    ({"zzz": 1}, ConfigError, r"unknown option 'zzz'; known options: capture, compute, .*, recompute"),
    ({"host_memory": "8 gigs"}, ConfigError, r"host_memory='8 gigs' is not a size; write a number and one of .*'8GiB'"),
    ({"device_memory": "GiB"}, ConfigError, r"device_memory='GiB' is not a size"),
    ({"device_memory": ""}, ConfigError, r"device_memory='' is not a size"),
    ({"device_memory": "-1GiB"}, ConfigError, r"device_memory='-1GiB' is not a size"),
    ({"device_memory": "1e9"}, ConfigError, r"device_memory='1e9' is not a size"),
    ({"device_memory": "1,5GiB"}, ConfigError, r"device_memory='1,5GiB' is not a size"),
    ({"device_memory": 1.5}, ConfigError, r"device_memory=1\.5 is not a size; give bytes as an int or a string"),
    ({"device_memory": True}, ConfigError, r"device_memory=True is not a size"),
    ({"host_memory": -1}, ConfigError, r"host_memory=-1 is negative; a budget is a number of bytes, 0 or more"),
    ({"nvme_memory": "much"}, ConfigError, r"nvme_memory='much' is not a size"),
    (
        {"nvme_write_budget": "2TB"},
        ConfigError,
        r"nvme_write_budget='2TB' is not bytes per day; write it like '2TB/day'",
    ),
    ({"prefetch_memory": "much"}, ConfigError, r"prefetch_memory='much' is not a size"),
    ({"nvme": "/nowhere/at/all"}, ConfigError, r"nvme='/nowhere/at/all' is not a folder; create it first"),
    ({"nvme": 3}, ConfigError, r"nvme=3 is not a path; give a folder on a local disk"),
    ({"nvme": __file__}, ConfigError, r"nvme='.*test_options\.py' is not a folder"),
    (
        {"compute_dtype": torch.int8},
        ConfigError,
        r"compute_dtype=torch\.int8 is not supported; use one of torch\.float32",
    ),
    ({"compute_dtype": "bf16"}, ConfigError, r"compute_dtype='bf16' is not supported; use one of .*torch\.bfloat16"),
    (
        {"compute": "fast"},
        ConfigError,
        r"compute='fast' is neither 'aten', op by op, nor 'inductor', compiled by blocks",
    ),
    ({"recompute": "yes"}, ConfigError, r"recompute='yes' is neither True nor False"),
    ({"capture": 1}, ConfigError, r"capture=1 is neither True nor False"),
]


@pytest.mark.parametrize(("options", "error", "message"), BAD_OPTIONS, ids=[str(each[0]) for each in BAD_OPTIONS])
def test_bad_option(
    options: dict[str, object], error: type[ZinfError], message: str, model: nn.Module, stays_plain: StaysPlain
) -> None:
    with stays_plain(model), pytest.raises(error, match=message):
        zinf_compile.optimize(model, **options)


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("8GiB", 8 * 2**30),
        ("1.5 GB", 1_500_000_000),
        ("64mib", 64 * 2**20),
        (" 4096 ", 4096),
        ("0", 0),
        (7, 7),
        ("3TiB", 3 * 2**40),
    ],
)
def test_good_sizes(text: str | int, nbytes: int) -> None:
    from zinf_compile.ir.config import make_config

    assert make_config({"device_memory": text, "host_memory": 0}).device_memory == nbytes


def size_in(message: str, option: str) -> str:
    found = re.search(rf"raise {option} to (\d+MiB)", message)
    assert found is not None, message
    return found[1]


def test_too_little_host_without_a_disk(model: nn.Module, stays_plain: StaysPlain) -> None:
    budgets = {"device_memory": "8MiB", "host_memory": "1MiB", "capture": False}
    with (
        stays_plain(model),
        pytest.raises(CapacityError, match=r"there is no nvme folder; largest: 2\.weight .* KiB, ") as error,
    ):
        zinf_compile.optimize(model, **budgets)
    zinf_compile.optimize(model, **{**budgets, "host_memory": size_in(str(error.value), "host_memory")})
    zinf_compile.close(model)


def test_too_little_device(model: nn.Module, stays_plain: StaysPlain, tmp_path: Path) -> None:
    budgets = {"device_memory": "100KiB", "host_memory": "4MiB", "nvme": tmp_path, "capture": False}
    with (
        stays_plain(model),
        pytest.raises(CapacityError, match=r"device_memory is 100\.0 KiB, .* largest: 0\.weight 156") as error,
    ):
        zinf_compile.optimize(model, **budgets)
    zinf_compile.optimize(model, **{**budgets, "device_memory": size_in(str(error.value), "device_memory")})
    zinf_compile.close(model)


def test_too_little_host_for_staging(model: nn.Module, stays_plain: StaysPlain, tmp_path: Path) -> None:
    budgets = {"device_memory": "8MiB", "host_memory": "64KiB", "nvme": tmp_path, "capture": False}
    with stays_plain(model), pytest.raises(CapacityError, match=r"staging of .*; raise host_memory to \d+MiB") as error:
        zinf_compile.optimize(model, **budgets)
    zinf_compile.optimize(model, **{**budgets, "host_memory": size_in(str(error.value), "host_memory")})
    zinf_compile.close(model)


def test_too_little_nvme(model: nn.Module, stays_plain: StaysPlain, tmp_path: Path) -> None:
    budgets = {"device_memory": "8MiB", "host_memory": "512KiB", "nvme": tmp_path, "nvme_memory": "64KiB"}
    with (
        stays_plain(model),
        pytest.raises(CapacityError, match=r"nvme_memory is 64\.0 KiB; largest: .*weight") as error,
    ):
        zinf_compile.optimize(model, **budgets)
    assert os.listdir(tmp_path) == []
    zinf_compile.optimize(model, **{**budgets, "nvme_memory": size_in(str(error.value), "nvme_memory")})
    zinf_compile.close(model)


def test_a_write_budget_that_no_plan_keeps_says_so_at_the_first_call(model: nn.Module, tmp_path: Path) -> None:
    budgets = {"device_memory": "1MiB", "host_memory": "512KiB", "nvme": tmp_path}
    zinf_compile.optimize(model, nvme_write_budget="1MB/day", **budgets)
    with pytest.raises(
        CapacityError, match=r"nvme_write_budget is 976\.6 KiB per day, and .*; raise it to '\d+GB/day'"
    ):
        model(torch.ones(2, 200)).sum().backward()
    with torch.no_grad():
        model(torch.ones(2, 200))  # evaluation writes nothing
    zinf_compile.close(model)


def test_activations_that_do_not_fit_say_so_at_the_first_call(model: nn.Module, tmp_path: Path) -> None:
    zinf_compile.optimize(model, device_memory="1MiB", host_memory="4MiB", nvme=tmp_path)
    with pytest.raises(
        CapacityError, match=r"needs .* on device, device_memory is 1\.0 MiB; .*activations .* largest: .*; raise"
    ):
        model(torch.ones(4096, 200)).sum().backward()
    model(torch.ones(2, 200)).sum().backward()
    assert model[0].weight.grad is not None
    zinf_compile.close(model)


def test_a_folder_that_cannot_be_written(
    model: nn.Module, stays_plain: StaysPlain, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # root may write anywhere
    with (
        stays_plain(model),
        pytest.raises(ConfigError, match=r"nvme='.*' cannot be written by this user; choose another"),
    ):
        zinf_compile.optimize(model, nvme=tmp_path)


@pytest.mark.parametrize("reason", [errno.EROFS, errno.EACCES])
def test_a_folder_that_the_system_refuses(
    reason: int, model: nn.Module, stays_plain: StaysPlain, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain_open = os.open

    def refuse(path: object, flags: int, *args: object, **kwargs: object) -> int:
        if str(path).startswith(str(tmp_path)):
            raise OSError(reason, os.strerror(reason))
        return plain_open(path, flags, *args, **kwargs)  # type: ignore[arg-type]

    with stays_plain(model), monkeypatch.context() as patch:
        patch.setattr(os, "open", refuse)
        with pytest.raises(
            ConfigError, match=rf"cannot create the store file in nvme folder .*: {os.strerror(reason)}"
        ):
            zinf_compile.optimize(model, nvme=tmp_path, device_memory="8MiB", host_memory="512KiB")


def test_a_disk_without_room(
    model: nn.Module, stays_plain: StaysPlain, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PosixEngine, "_free_nbytes", lambda self: 100_000)
    with (
        stays_plain(model),
        pytest.raises(CapacityError, match=r"the store needs .* GiB are free there .*; free some space"),
    ):
        zinf_compile.optimize(model, nvme=tmp_path, device_memory="8MiB", host_memory="512KiB")
    assert os.listdir(tmp_path) == []


def test_a_disk_that_fills_up_while_it_is_reserved(
    model: nn.Module, stays_plain: StaysPlain, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(descriptor: int, offset: int, nbytes: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with stays_plain(model), pytest.raises(CapacityError, match="No space left on device"):
        zinf_compile.optimize(model, nvme=tmp_path, device_memory="8MiB", host_memory="512KiB")


def test_optimizer_state_has_its_room_on_the_disk_from_the_start(model: nn.Module, tmp_path: Path) -> None:
    from zinf_compile.runtime.params.records import record_of

    zinf_compile.optimize(model, nvme=tmp_path, device_memory="8MiB", host_memory="512KiB", capture=False)
    record = record_of(model[0].weight)
    assert record is not None
    assert record.store.engine is not None
    reserved = record.store.engine.nbytes
    model(torch.ones(2, 200)).sum().backward()
    torch.optim.AdamW(model.parameters()).step()
    assert record.store.engine.nbytes == reserved
    zinf_compile.close(model)
