"""Hardware profiles: the presets match their sources; the error for a bad file lists all of its problems."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from zinf_compile.hardware.profile_io import load_hardware, parse_hardware, preset_names, read_quantity, save_hardware
from zinf_compile.ir.errors import ConfigError
from zinf_compile.ir.glossary import Tier
from zinf_compile.ir.hardware import Hardware


def document() -> Any:
    """Return the profile of a small machine, as a user would write it."""
    routes = {"host -> device": "12 GB/s", "device -> host": "12 GB/s"}
    routes |= {
        "nvme -> device": "3 GB/s",
        "nvme -> host": "3 GB/s",
        "device -> nvme": "2 GB/s",
        "host -> nvme": "2 GB/s",
    }
    return {
        "name": "mine",
        "unified": False,
        "flops": [{"name": "float32", "per_second": "8 TFLOP/s"}],
        "peak_flops": [{"name": "float32", "per_second": 1e13}],
        "memory_bytes_per_second": "900 GB/s",
        "routes": [
            {"name": name, "bytes_per_second": rate, "latency_seconds": "5 us", "lanes": ["link"]}
            for name, rate in routes.items()
        ],
        "optimizer_elements_per_second": "1.5 G elements/s",
        "tiers": [{"tier": "device", "nbytes": "24 GiB"}, {"tier": "host", "nbytes": 64 * 10**9}],
    }


def problems_of(change: Callable[[Any], object]) -> list[str]:
    """Return the reported problems of the small machine's profile after a change."""
    changed = document()
    change(changed)
    with pytest.raises(ConfigError) as raised:
        parse_hardware(json.dumps(changed), source="mine.json")
    first, *listed = str(raised.value).splitlines()
    assert first.startswith("mine.json is no hardware profile that can be used")
    assert f" {len(listed)} field(s)" in first
    return [line.strip() for line in listed]


@pytest.mark.parametrize("name", preset_names())
def test_a_preset_is_complete(name: str) -> None:
    hardware = load_hardware(name)
    assert hardware.name == name
    assert hardware.sources
    assert {size.tier for size in hardware.tiers} == set(Tier)
    assert {rate.name for rate in hardware.flops} == {rate.name for rate in hardware.peak_flops} | (
        {"bfloat16"} if name == "dgx2" else set()  # computed in float32 there
    )
    assert hardware.memory_bytes_per_second > hardware.bytes_per_second(Tier.HOST, Tier.DEVICE)
    assert hardware.bytes_per_second(Tier.HOST, Tier.DEVICE) > hardware.bytes_per_second(Tier.NVME, Tier.DEVICE)


def test_the_presets_are_those_promised() -> None:
    assert preset_names() == ("8xrtx4090", "a100-80g", "dgx2", "h100-80g", "h200", "laptop-16g", "rtx4090")


def test_memory_is_unified_where_the_profile_says_so() -> None:
    """Whether updates on the host take time from compute says nothing about it: a GB10's do, and so may a small GPU's."""
    assert [name for name in preset_names() if load_hardware(name).memory.unified] == ["laptop-16g"]
    for unified in (False, True):
        for share in (0.0, 0.5, 1.0):
            profile = document() | {"unified": unified, "updates_take_of_compute": share}
            assert parse_hardware(json.dumps(profile)).memory.unified == unified


def test_an_integrated_device_is_one_that_is_not_unified() -> None:
    memory = parse_hardware(json.dumps(document() | {"unified": False, "integrated": True})).memory
    assert memory.is_in_ram
    assert not memory.unified
    with pytest.raises(ConfigError, match="unified and integrated are both true"):
        parse_hardware(json.dumps(document() | {"unified": True, "integrated": True}))


def test_dgx2_is_that_of_the_paper() -> None:
    dgx2 = load_hardware("dgx2")
    assert (dgx2.devices_per_node, dgx2.num_nodes) == (16, 1)
    assert dgx2.flops_per_second("float16") == 70e12
    assert dgx2.bytes_per_second(Tier.HOST, Tier.DEVICE) == 3e9
    assert dgx2.bytes_per_second(Tier.NVME, Tier.DEVICE) == 1.6e9
    assert dgx2.device_link_bytes_per_second == 70e9
    assert dgx2.node_link_bytes_per_second == 8 * read_quantity("node_link_bytes_per_second", "100 Gb/s")
    sizes = {size.tier: size.nbytes for size in dgx2.tiers}
    assert sizes == {Tier.DEVICE: 32 * 2**30, Tier.HOST: 1536 * 2**30 // 16, Tier.NVME: 28 * 10**12 // 16}


def test_a_saved_profile_is_read_again(tmp_path: Path) -> None:
    for name in preset_names():
        save_hardware(load_hardware(name), tmp_path / "saved.json")
        assert load_hardware(tmp_path / "saved.json") == load_hardware(name)
    with pytest.raises(ConfigError, match=r"absent/saved\.json: No such file"):
        save_hardware(load_hardware("h200"), tmp_path / "absent" / "saved.json")


def test_numbers_may_be_written_as_people_do() -> None:
    hardware = parse_hardware(json.dumps(document() | {"peak_flops": []}))
    assert hardware.flops_per_second("float32") == 8e12
    assert hardware.memory_bytes_per_second == 900e9
    assert hardware.optimizer_elements_per_second == 1.5e9
    assert hardware.route(Tier.HOST, Tier.DEVICE).latency_seconds == 5e-6
    assert [size.nbytes for size in hardware.tiers] == [24 * 2**30, 64 * 10**9]


@pytest.mark.parametrize(
    ("field", "text", "number"),
    [
        ("bytes_per_second", "12GB/s", 12e9),
        ("bytes_per_second", "1.5 GiB/s", 1.5 * 2**30),
        ("bytes_per_second", "100 Gb/s", 12.5e9),
        ("bytes_per_second", "400 Gbit/s", 50e9),
        ("per_second", "70 TFLOPS", 70e12),
        ("per_second", "1.2e3 GFLOP/s", 1.2e12),
        ("latency_seconds", "80ms", 0.08),
        ("latency_seconds", "5µs", 5e-6),
        ("optimizer_elements_per_second", "250 M elements/s", 250e6),
        ("nbytes", "32GiB", 32 * 2**30),
    ],
)
def test_units(field: str, text: str, number: float) -> None:
    assert read_quantity(field, text) == pytest.approx(number, rel=1e-12)


@pytest.mark.parametrize(
    ("field", "text", "expected"),
    [
        ("bytes_per_second", "12", "bytes per second, such as '12 GB/s'"),
        ("bytes_per_second", "12 gb/s", "bytes per second"),
        ("bytes_per_second", "12 GB", "bytes per second"),
        ("per_second", "fast", "FLOP/s, such as '70 TFLOP/s'"),
        ("latency_seconds", "5 GB/s", "seconds, such as '5 us'"),
        ("nbytes", "32 GFLOP/s", "a size such as '32 GiB'"),
        ("devices_per_node", "8", "a JSON number"),
    ],
)
def test_text_that_is_no_such_number(field: str, text: str, expected: str) -> None:
    with pytest.raises(ValueError, match=expected):
        read_quantity(field, text)


def test_everything_missing_is_listed() -> None:
    with pytest.raises(ConfigError) as raised:
        parse_hardware("{}")
    for field in ("name", "unified", "flops", "memory_bytes_per_second", "routes", "optimizer_elements_per_second"):
        assert f"lacks the field {field}\n" in f"{raised.value}\n"


def test_missing_unknown_and_absurd_fields_are_listed_together() -> None:
    def spoil(profile: Any) -> None:
        del profile["memory_bytes_per_second"]
        profile["cores"] = 8
        profile["flops"][0]["per_second"] = "-8 TFLOP/s"
        profile["routes"][0]["latency_seconds"] = "2 h"
        del profile["routes"][1]["lanes"]
        del profile["routes"][5]
        profile["tiers"][0]["nbytes"] = 24

    problems = problems_of(spoil)
    assert len(problems) == 7
    for problem in (
        "has an unknown field cores; Hardware has ",
        "lacks the field memory_bytes_per_second",
        "lacks the field routes[1].lanes",
        "flops[0].per_second = -8e+12 is negative",
        "tiers[0].nbytes = 24 is not between 1.04858e+06 and 1.15292e+18; write it with its unit, such as '32 GiB'",
        "routes[0].latency_seconds = 7200 is not between 0 and 1; write it with its unit, such as '5 us'",
        "routes lacks 'host -> nvme'; bytes move that way",
    ):
        assert any(listed.startswith(problem) for listed in problems), problem


def put(path: str, value: object) -> Callable[[Any], None]:
    """Return a function that sets the value at a path such as ``"routes.0.name"``."""

    def change(profile: Any) -> None:
        *steps, last = [int(step) if step.isdigit() else step for step in path.split(".")]
        for step in steps:
            profile = profile[step]
        profile[last] = value

    return change


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (put("unified", "yes"), 'is damaged at unified: "yes" is not'),
        (put("name", ""), "name is empty; say which machine it is"),
        (put("flops", []), "flops is empty; give at least the rate of float32"),
        (put("flops.0.name", "fp32"), "flops[0].name = 'fp32' is no dtype; use float64, float32"),
        (
            put("flops.0.per_second", 70),
            "flops[0].per_second = 70 is not between 1e+08 and 1e+17; write it with its unit",
        ),
        (put("flops.0.per_second", "11 TFLOP/s"), "flops[0].per_second = 1.1e+13 of float32 is over its peak of 1e+13"),
        (put("memory_bytes_per_second", 0), "memory_bytes_per_second is 0; write what the machine has"),
        (put("memory_bytes_per_second", 900), "memory_bytes_per_second = 900 is not between"),
        (
            put("links_take_of_compute", 1.5),
            "links_take_of_compute = 1.5 is not between 0 and 1; it is a share of compute",
        ),
        (put("updates_take_of_compute", -1.0), "updates_take_of_compute = -1.0 is not between 0 and 1"),
        (put("optimizer_elements_per_second", -1), "optimizer_elements_per_second = -1 is negative"),
        (put("routes.0.bytes_per_second", 12), "routes[0].bytes_per_second = 12 is not between 1e+06 and 1e+15"),
        (put("routes.0.lanes", []), "routes[0].lanes is empty"),
        (put("tiers.1.tier", "device"), "tiers gives device twice"),
        (put("tiers.1.tier", "tape"), 'is damaged at tiers[1].tier: "tape" is not one of device, host, nvme'),
        (put("devices_per_node", 0), "devices_per_node = 0 is not between 1 and 1000000"),
        (put("devices_per_node", 8), "device_link_bytes_per_second is 0, and devices_per_node is 8"),
        (put("num_nodes", 4), "node_link_bytes_per_second is 0, and num_nodes is 4"),
        (put("device_link_lanes", ["pcie"]), "device_link_lanes names 'pcie', which no route takes"),
        (put("node_link_bytes_per_second", 100), "node_link_bytes_per_second = 100 is not between"),
        (
            put("memory_bytes_per_second", "fast"),
            'is damaged at memory_bytes_per_second: "fast" is not bytes per second',
        ),
        (put("routes", 3), "is damaged at routes: 3 is not a JSON array"),
    ],
)
def test_an_absurd_field_is_refused(change: Callable[[Any], None], problem: str) -> None:
    assert any(listed.startswith(problem) for listed in problems_of(change))


def test_a_route_between_no_tiers_is_refused_and_missed() -> None:
    problems = problems_of(put("routes.2.name", "tape -> device"))
    assert problems[0].startswith("routes[2].name = 'tape -> device' is no route between device, host, nvme")
    assert problems[1].startswith("routes lacks 'nvme -> device'")


def test_a_machine_without_a_disk_needs_no_routes_to_one() -> None:
    profile = document()
    profile["routes"] = [route for route in profile["routes"] if "nvme" not in route["name"]]
    assert isinstance(parse_hardware(json.dumps(profile)), Hardware)
    problems = problems_of(lambda changed: changed.update(routes=profile["routes"][:1]))
    assert problems == ["routes lacks 'device -> host'; bytes move that way"]


def test_files_that_are_no_profile(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"no hardware profile 'h300': No such file.*; give a file, or one of 8xrtx4090, a100-80g, "
    ):
        load_hardware("h300")
    path = tmp_path / "mine.json"
    path.write_bytes(b"\xff")
    with pytest.raises(ConfigError, match=r"mine\.json is no hardware profile: byte 0 is not UTF-8"):
        load_hardware(path)
    path.write_text("{")
    with pytest.raises(ConfigError, match=r"mine\.json is damaged at line 1 column 2: .*zinf doctor --save FILE"):
        load_hardware(path)
    path.write_text("[]")
    with pytest.raises(ConfigError, match=r"an array of 0 is not a JSON object \(Hardware\)"):
        load_hardware(path)
