"""Worlds of ranks: the nodes that they fill, the links between them, and the traffic over the links."""

from dataclasses import replace

import pytest

from zinf_compile.hardware.profile_io import load_hardware
from zinf_compile.hardware.world import World
from zinf_compile.ir.errors import ConfigError
from zinf_compile.ir.glossary import Tier
from zinf_compile.ir.hardware import DEVICE_LINKS, NODE_LINKS, Hardware

DGX2 = load_hardware("dgx2")


@pytest.mark.parametrize(("num_ranks", "num_nodes"), [(1, 1), (3, 1), (16, 1), (32, 2), (512, 32)])
def test_ranks_fill_nodes(num_ranks: int, num_nodes: int) -> None:
    assert DGX2.with_world(num_ranks) == replace(DGX2, num_nodes=num_nodes)


@pytest.mark.parametrize(
    ("hardware", "num_ranks", "message"),
    [
        (DGX2, 0, r"a world of 0 ranks is none; give a whole number, 1 or more"),
        (DGX2, True, r"a world of True ranks is none"),
        (DGX2, 40, r"40 ranks do not fill whole nodes of dgx2, which have 16 devices each; give 32 or 48 ranks"),
        (replace(DGX2, device_link_bytes_per_second=0.0), 2, r"dgx2 has no device links, which 2 ranks need"),
        (replace(DGX2, node_link_bytes_per_second=0.0), 32, r"no node links, .* give its node_link_bytes_per_second"),
    ],
)
def test_impossible_worlds_are_refused(hardware: Hardware, num_ranks: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        hardware.with_world(num_ranks)


def test_one_device_a_node_needs_no_device_links() -> None:
    hardware = replace(DGX2, devices_per_node=1, device_link_bytes_per_second=0.0, node_link_bytes_per_second=10.0)
    assert hardware.with_world(4).links(4).bytes_per_second == pytest.approx(10 * 4 / 3)


def test_a_device_receives_what_the_others_have() -> None:
    # 3/4 of the full value at 70 GB/s.
    links = DGX2.links(4)
    assert (links.name, links.lanes) == (DEVICE_LINKS, (DEVICE_LINKS,))
    assert 280e9 / links.bytes_per_second == pytest.approx(3.0)


def test_between_nodes_the_slower_links_count() -> None:
    # Meanwhile a node receives half of it: at 100 GB/s it is done before its devices are, at 10 GB/s after them.
    fast, slow = DGX2.links(32), replace(DGX2, node_link_bytes_per_second=10e9).links(32)
    assert (fast.name, slow.name) == (DEVICE_LINKS, NODE_LINKS)
    assert 320e9 / fast.bytes_per_second == pytest.approx(31 * 10 / 70)
    assert 320e9 / slow.bytes_per_second == pytest.approx(16.0)


def test_shards_move_over_routes_and_full_values_over_links() -> None:
    world = World(hardware=DGX2, num_ranks=16)
    assert [(leg.route.name, leg.nbytes) for leg in world.gather_legs(Tier.NVME, 1600)] == [
        ("nvme -> device", 100),
        (DEVICE_LINKS, 1600),
    ]
    legs = world.gradient_legs(Tier.HOST, 1600, is_resident=False)
    assert [(leg.route.name, leg.nbytes) for leg in legs] == [(DEVICE_LINKS, 1600), ("device -> host", 100)]
    # A resident parameter is replicated: its gradient is reduced, and its updated shards are all-gathered.
    assert [leg.nbytes for leg in world.gradient_legs(Tier.DEVICE, 1600, is_resident=True)] == [3200]


def test_one_rank_has_no_links_to_go_over() -> None:
    world = World(hardware=DGX2, num_ranks=1)
    assert [leg.route.name for leg in world.gather_legs(Tier.NVME, 1600)] == ["nvme -> device"]
    assert [leg.nbytes for leg in world.gradient_legs(Tier.HOST, 1600, is_resident=True)] == [1600]
    assert world.gradient_legs(Tier.DEVICE, 1600, is_resident=True) == ()
