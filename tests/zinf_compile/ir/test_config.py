"""Config: valid options, how they are parsed, and the errors for invalid ones."""

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zinf_compile.ir import config as config_module
from zinf_compile.ir.config import Config, FoundDevice, free_memory, make_config, parse_size
from zinf_compile.ir.errors import ConfigError, ZinfError
from zinf_compile.ir.glossary import format_bytes
from zinf_compile.ir.hardware import MemorySpace

GIB = 2**30


@pytest.mark.parametrize(
    ("size", "nbytes"),
    [
        (0, 0),
        (4096, 4096),
        ("123", 123),
        ("8GiB", 8 * GIB),
        ("1.5 GB", 1_500_000_000),
        (" 2 mib ", 2 * 2**20),
        ("1kb", 1000),
        ("1KiB", 1024),
        ("3TiB", 3 * 2**40),
        ("7B", 7),
    ],
)
def test_sizes_become_bytes(size: int | str, nbytes: int) -> None:
    assert parse_size(size, option="device_memory") == nbytes


@pytest.mark.parametrize(
    "size", ["", "lots", "8 GiBs", "GiB", "-1GiB", "1,5GiB", "1e3", "8G", True, 1.5, None, b"8GiB"]
)
def test_what_is_no_size_is_refused_with_its_option(size: object) -> None:
    with pytest.raises(ConfigError, match=r"host_memory=.* is not a size; .*'8GiB'"):
        parse_size(size, option="host_memory")  # type: ignore[arg-type]  # that is what is tested


def test_a_negative_size_is_refused() -> None:
    with pytest.raises(ConfigError, match="nvme_memory=-1 is negative"):
        parse_size(-1, option="nvme_memory")


@given(st.integers(min_value=0, max_value=2**50))
def test_plain_bytes_are_exact(nbytes: int) -> None:
    assert parse_size(str(nbytes), option="device_memory") == parse_size(nbytes, option="device_memory") == nbytes


@given(st.integers(min_value=0, max_value=2**50))
def test_what_is_printed_can_be_written(nbytes: int) -> None:
    parsed = parse_size(format_bytes(nbytes), option="device_memory")
    assert abs(parsed - nbytes) <= max(nbytes * 0.05, 0.005 * GIB if nbytes >= GIB else 0)


@pytest.mark.parametrize(
    ("option", "nearest"),
    [
        ("device_mem", "device_memory"),
        ("host_memroy", "host_memory"),
        ("compute_type", "compute_dtype"),
        ("prefetch", "prefetch_memory"),
        ("recompute_blocks", "recompute"),
    ],
)
def test_an_unknown_option_gets_the_nearest_name(option: str, nearest: str) -> None:
    with pytest.raises(ConfigError, match=f"unknown option '{option}'; did you mean '{nearest}'?"):
        make_config({option: 1})


def test_an_option_like_no_other_gets_the_list() -> None:
    with pytest.raises(ConfigError, match=r"unknown option 'zzz'; known options: capture, compute, .*recompute"):
        make_config({"zzz": 1})


def test_a_folder_that_does_not_exist() -> None:
    with pytest.raises(ConfigError, match=r"nvme='/no/such/folder' is not a folder; create it first"):
        make_config({"nvme": "/no/such/folder"})


def test_a_file_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="is not a folder"):
        make_config({"nvme": tmp_path / "file"})


def test_a_folder_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # file modes do not stop root
    with pytest.raises(ConfigError, match="cannot be written by this user; choose another folder or change its mode"):
        make_config({"nvme": tmp_path})


def test_a_number_is_no_folder() -> None:
    with pytest.raises(ConfigError, match="nvme=3 is not a path"):
        make_config({"nvme": 3})


@pytest.mark.parametrize("as_text", [False, True])
def test_a_folder_is_kept_as_text(tmp_path: Path, *, as_text: bool) -> None:
    assert make_config({"nvme": str(tmp_path) if as_text else tmp_path}).nvme == str(tmp_path)


@pytest.mark.parametrize("dtype", ["bfloat16", "torch.bfloat16"])
def test_a_compute_dtype_by_name(dtype: str) -> None:
    assert make_config({"compute_dtype": dtype}).compute_dtype == "bfloat16"


def test_a_compute_dtype_of_torch() -> None:
    torch = pytest.importorskip("torch")
    assert make_config({"compute_dtype": torch.float16}).compute_dtype == "float16"


def test_a_compute_dtype_that_is_not_supported() -> None:
    with pytest.raises(ConfigError, match=r"compute_dtype='int8' is not supported; use one of torch.float32, "):
        make_config({"compute_dtype": "int8"})


def test_compute_is_op_by_op_unless_it_is_asked_for() -> None:
    assert make_config({}).compute == "aten"
    assert make_config({"compute": "inductor"}).compute == "inductor"


def test_an_unknown_compute_is_refused() -> None:
    with pytest.raises(ConfigError, match="compute='fast' is neither 'aten', op by op, nor 'inductor'"):
        make_config({"compute": "fast"})


@pytest.mark.parametrize("option", ["recompute", "capture"])
def test_a_flag_is_true_or_false(option: str) -> None:
    with pytest.raises(ConfigError, match=f"{option}='yes' is neither True nor False"):
        make_config({option: "yes"})


def test_all_errors_are_of_one_family() -> None:
    with pytest.raises(ZinfError):
        make_config({"nvme": "/no/such/folder"})
    with pytest.raises(ValueError, match="unknown option"):
        make_config({"zzz": 1})


def test_defaults_without_budgets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config_module, "free_memory", lambda: 10 * GIB)
    assert make_config({}) == Config(
        device_memory=4 * GIB,
        host_memory=4 * GIB,
        nvme=None,
        nvme_memory=None,
        compute_dtype=None,
        compute="aten",
        prefetch_memory=None,
        recompute=None,
        capture=True,
    )


@pytest.mark.parametrize("given_option", ["device_memory", "host_memory"])
def test_the_budget_that_is_not_given_is_what_is_left(monkeypatch: pytest.MonkeyPatch, given_option: str) -> None:
    monkeypatch.setattr(config_module, "free_memory", lambda: 10 * GIB)
    config = make_config({given_option: "3GiB"})
    assert {config.device_memory, config.host_memory} == {3 * GIB, 5 * GIB}
    assert getattr(config, given_option) == 3 * GIB


def test_budgets_over_the_machine_leave_nothing_for_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config_module, "free_memory", lambda: 10 * GIB)
    assert make_config({"device_memory": "100GiB"}).host_memory == 0


@pytest.mark.parametrize("given_option", ["device_memory", "host_memory", None])
def test_budgets_of_an_integrated_device_share_the_ram(
    monkeypatch: pytest.MonkeyPatch, given_option: str | None
) -> None:
    monkeypatch.setattr(config_module, "free_memory", lambda: 10 * GIB)

    def find(integrated: bool) -> FoundDevice:
        return FoundDevice(memory=MemorySpace(unified=False, integrated=integrated), largest_budget=9 * GIB)

    given = {"device": "cuda"} if given_option is None else {"device": "cuda", given_option: "3GiB"}
    config = make_config(given, find_device=lambda name: find(integrated=True))
    assert config.memory == MemorySpace(unified=False, integrated=True)
    assert config.device_memory + config.host_memory == 8 * GIB
    assert given_option is None or getattr(config, given_option) == 3 * GIB
    apart = make_config({"device": "cuda"}, find_device=lambda name: find(integrated=False))
    assert (apart.device_memory, apart.host_memory) == (9 * GIB, 8 * GIB)


def test_options_that_are_none_are_not_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config_module, "free_memory", lambda: 10 * GIB)
    assert make_config(dict.fromkeys(("device_memory", "nvme", "recompute", "compute_dtype"))) == make_config({})


def test_budgets_that_are_given_need_no_look_at_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config_module, "free_memory", lambda: pytest.fail("looked"))
    config = make_config({"device_memory": 1, "host_memory": 2, "prefetch_memory": "1KiB", "capture": False})
    assert (config.device_memory, config.host_memory, config.prefetch_memory, config.capture) == (1, 2, 1024, False)


def test_staging_is_half_of_the_host_up_to_a_limit() -> None:
    assert make_config({"device_memory": 0, "host_memory": 1000}).staging_memory == 500
    assert make_config({"device_memory": 0, "host_memory": "64GiB"}).staging_memory == 192 * 2**20


def test_staging_for_whole_tensors_takes_what_homes_can_spare() -> None:
    config = make_config({"device_memory": 0, "host_memory": 1600})
    assert [config.with_staging_for(nbytes).staging_memory for nbytes in (0, 800, 801, 1500, 10**6)] == [
        *(800, 800, 801, 1500, 1500)
    ]
    larger = config.with_staging_for(1200)
    assert larger.with_staging_for(1000) == larger
    assert larger.with_staging_for(1300).staging_memory == 1300


def test_free_memory_is_between_nothing_and_the_machine() -> None:
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert 0 <= free_memory() <= pages


def test_the_process_is_measured_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config_module, "DEFAULT_RESERVE", config_module.MEASURED)  # the default outside of tests
    budgets = {"device_memory": "1GiB", "host_memory": "1GiB"}
    assert make_config(budgets).measures_reserve
    assert not make_config({**budgets, "reserve_memory": 0}).measures_reserve
    with pytest.raises(ConfigError, match=r"unknown option 'measures_reserve'"):
        make_config({**budgets, "measures_reserve": True})


@pytest.mark.parametrize(
    ("option", "value"), [("overlap_step", False), ("step_in_backward", True), ("capture", False), ("stage", 1)]
)
def test_updates_ahead_need_a_step_that_may_run_beside_compute(option: str, value: object) -> None:
    budgets = {"device_memory": 1, "host_memory": 1}
    assert make_config({**budgets, "speculate": True}).speculate is True
    assert make_config({**budgets, option: value}).speculate is None
    assert make_config({**budgets, option: value, "speculate": False}).speculate is False
    with pytest.raises(ConfigError, match="speculate='always' is neither True, False nor 'auto'"):
        make_config({**budgets, "speculate": "always"})
    with pytest.raises(ConfigError, match=rf"speculate=True begins updates in backward, .* with {option}={value}"):
        make_config({**budgets, "speculate": True, option: value})


def test_writes_to_nvme_are_limited_per_day() -> None:
    budgets = {"device_memory": 1, "host_memory": 1}
    assert make_config(budgets).nvme_write_budget is None
    assert make_config({**budgets, "nvme_write_budget": "2TB/day"}).nvme_write_budget == 2 * 10**12
    assert make_config({**budgets, "nvme_write_budget": "1.5 GiB / day"}).nvme_write_budget == 3 * 2**29
    assert make_config({**budgets, "nvme_write_budget": 10**9}).nvme_write_budget == 10**9
    for bad in ("2TB", "2TB/hour"):
        with pytest.raises(
            ConfigError, match=f"nvme_write_budget='{bad}' is not bytes per day; write it like '2TB/day'"
        ):
            make_config({**budgets, "nvme_write_budget": bad})
    with pytest.raises(ConfigError, match="nvme_write_budget='many' is not a size"):
        make_config({**budgets, "nvme_write_budget": "many/day"})
