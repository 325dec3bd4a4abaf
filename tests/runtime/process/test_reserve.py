"""Memory of the process: estimated while a graph is captured, measured before its first run and after two steps."""

from dataclasses import replace

import pytest

from zinf_compile.ir.config import Config, make_config
from zinf_compile.runtime.process.reserve import ProcessReserve

MIB = 2**20
AUTO = {"device_memory": "512MiB", "host_memory": "64MiB", "reserve_memory": "auto", "compute": "aten"}


class Process:
    """A store whose process holds as much memory as a test sets."""

    def __init__(self) -> None:
        self.held, self.num_steps, self.num_looks = 20 * MIB, 0, 0

    def reserve_needed(self) -> int:
        self.num_looks += 1
        return self.held


def looked_at(reserve: ProcessReserve, config: Config) -> Config:
    return replace(config, reserve_memory=reserve.look(config))


def test_what_is_measured_replaces_what_was_expected() -> None:
    process = Process()
    reserve = ProcessReserve(process)
    config = make_config(AUTO)
    config = replace(config, reserve_memory=reserve.expect(config))
    assert config.reserve_memory > process.held
    assert reserve.expect_least(config) == 24 * MIB
    process.held = 201 * MIB  # more than expected
    config = looked_at(reserve, config)
    assert 201 * MIB < config.reserve_memory <= 232 * MIB
    assert config.reserve_memory % (8 * MIB) == 0
    process.num_steps, process.held = 1, 195 * MIB  # enough is reserved, and not far too much
    assert looked_at(reserve, config) == config
    process.num_steps, process.held = 2, 260 * MIB
    config = looked_at(reserve, config)
    assert config.reserve_memory > 260 * MIB
    process.num_steps, process.held = 3, 400 * MIB
    assert looked_at(reserve, config) == config
    assert process.num_looks == 4  # one at the capture, and none after the second step


def test_what_the_model_keeps_outside_of_the_store_is_always_reserved() -> None:
    """Such as quantised weights: they exist before the process grows, so measuring its growth does not see them."""
    process, kept = Process(), 100 * MIB
    reserves = ProcessReserve(process), ProcessReserve(process, kept_nbytes=kept)
    without, config = make_config(AUTO), replace(make_config(AUTO), reserve_memory=kept)
    assert reserves[1].expect(config) >= reserves[0].expect(without) + kept - 8 * MIB
    assert reserves[1].expect_least(config) >= kept + process.held
    assert looked_at(reserves[1], config).reserve_memory >= kept + process.held


def test_far_less_is_given_back() -> None:
    process = Process()
    reserve = ProcessReserve(process)
    config = make_config(AUTO)
    config = replace(config, reserve_memory=reserve.expect(config))
    assert looked_at(reserve, config).reserve_memory < config.reserve_memory


@pytest.mark.parametrize(
    ("options", "is_measured"),
    [
        ({}, True),
        ({"device_memory": "128MiB", "host_memory": "127MiB"}, False),
        ({"device_memory": "128MiB", "host_memory": "128MiB"}, True),
        ({"reserve_memory": 0}, False),
        ({"reserve_memory": "16MiB"}, False),
        ({"device": "cuda"}, False),
    ],
)
def test_where_it_is_measured(options: dict[str, object], *, is_measured: bool) -> None:
    config = make_config({**AUTO, **options})
    assert config.measures_reserve is is_measured
    assert config.reserve_memory == (16 * MIB if options.get("reserve_memory") == "16MiB" else 0)
    if not is_measured:
        process = Process()
        reserve = ProcessReserve(process)
        assert reserve.expect(config) == reserve.look(config) == config.reserve_memory
        assert process.num_looks == 0
