"""Worlds of ranks: the nodes that they fill, the links between them, and the traffic over the links."""

from dataclasses import replace

import pytest

from zinf_compile.hardware.profile_io import load_hardware
from zinf_compile.hardware.world import World
from zinf_compile.ir.errors import ConfigError
from zinf_compile.ir.glossary import Tier
from zinf_compile.ir.hardware import DEVICE_LINKS, NODE_LINKS, Hardware, count_ranks_of_replica

DGX2 = load_hardware("dgx2")


@pytest.mark.parametrize(("num_ranks", "num_nodes"), [(1, 1), (3, 1), (16, 1), (32, 2), (512, 32)])
def test_ranks_fill_nodes(num_ranks: int, num_nodes: int) -> None:
    assert DGX2.with_world(num_ranks) == replace(DGX2, num_nodes=num_nodes)


@pytest.mark.parametrize(
    ("num_ranks", "num_replicas", "num_nodes"), [(1, 16, 1), (3, 5, 1), (1, 32, 2), (4, 8, 2), (16, 2, 2), (32, 3, 6)]
)
def test_replicas_fill_nodes_together(num_ranks: int, num_replicas: int, num_nodes: int) -> None:
    assert DGX2.with_world(num_ranks, num_replicas) == replace(DGX2, num_nodes=num_nodes)


@pytest.mark.parametrize(
    ("num_ranks", "num_replicas", "message"),
    [
        (4, 0, r"a world of 0 replicas is none; give a whole number, 1 or more"),
        (4, 5, r"20 ranks do not fill whole nodes of dgx2, which have 16 devices each; give 80 ranks"),
        (22, 2, r"44 ranks do not fill whole nodes of dgx2, which have 16 devices each; give 32 or 64 ranks"),
        (
            12,
            4,
            r"4 replicas of 12 ranks each are spread unevenly over nodes of dgx2, which have 16 devices each; give",
        ),
        (24, 2, r"2 replicas of 24 ranks each are spread unevenly"),
    ],
)
def test_impossible_replicas_are_refused(num_ranks: int, num_replicas: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        DGX2.with_world(num_ranks, num_replicas)


def test_replicas_need_links_although_a_rank_alone_does_not() -> None:
    with pytest.raises(ConfigError, match=r"dgx2 has no device links, which 2 ranks need"):
        replace(DGX2, device_link_bytes_per_second=0.0).with_world(1, 2)
    with pytest.raises(ConfigError, match=r"dgx2 has no node links, which 32 ranks need"):
        replace(DGX2, node_link_bytes_per_second=0.0).with_world(16, 2)


@pytest.mark.parametrize(("world", "replicas", "num_ranks"), [(1, 1, 1), (12, 3, 4), (8, 8, 1)])
def test_replicas_divide_a_world(world: int, replicas: int, num_ranks: int) -> None:
    assert count_ranks_of_replica(world, replicas) == num_ranks


@pytest.mark.parametrize(
    ("world", "replicas", "message"),
    [
        (16, 0, "a world of 0 replicas is none"),
        (0, 1, "a world of 0 ranks is none"),
        (16, 3, "16 ranks do not make 3 replicas of equally many ranks; give a number .* that divides 16, or 15 ranks"),
        (2, 4, "2 ranks do not make 4 replicas of equally many ranks; give a number .* that divides 2, or 4 ranks"),
    ],
)
def test_a_world_that_replicas_do_not_divide_is_refused(world: int, replicas: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        count_ranks_of_replica(world, replicas)


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


@pytest.mark.parametrize(
    ("num_ranks", "num_replicas", "node_link", "name", "rate"),
    [
        (4, 4, 100e9, DEVICE_LINKS, 70e9),  # all in one node
        (1, 2, 100e9, DEVICE_LINKS, 70e9),
        (16, 2, 100e9, NODE_LINKS, 100e9 / 16),  # 16 ranks of a node pass on their shards at once
        (32, 2, 100e9, NODE_LINKS, 100e9 / 16),
        (
            4,
            8,
            100e9,
            NODE_LINKS,
            100e9 / 4,
        ),  # four replicas in each of two nodes: one of them passes on to the other node
        (4, 8, 400e9, DEVICE_LINKS, 70e9),  # where that is faster than passing on inside the node
        (1, 32, 100e9, DEVICE_LINKS, 70e9),
        (1, 32, 10e9, NODE_LINKS, 10e9),
    ],
)
def test_the_slower_links_between_replicas_count(
    num_ranks: int, num_replicas: int, node_link: float, name: str, rate: float
) -> None:
    hardware = replace(DGX2, node_link_bytes_per_second=node_link).with_world(num_ranks, num_replicas)
    links = hardware.replica_links(num_ranks, num_replicas)
    assert (links.name, links.lanes) == (name, (name,))
    assert links.bytes_per_second == pytest.approx(rate)


@pytest.mark.parametrize(
    ("num_replicas", "ordered", "fast"),
    [
        (2, 2, 1),  # one hop, and back to one rank; half of it there and half of it back
        (3, 4, 4 / 3),  # two hops, and back in two rounds: to one rank, and from both to the other
        (4, 5, 3 / 2),  # in the second round two ranks get it at once
        (8, 10, 7 / 4),
    ],
)
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_shards_pass_between_replicas(num_ranks: int, num_replicas: int, ordered: float, fast: float) -> None:
    """A shard of 2.1 GB takes 0.03 s over the device links, for each time that it passes."""
    nbytes = 2_100_000_000
    for is_ordered, times in ((True, ordered), (False, fast)):
        world = World(hardware=DGX2, num_ranks=num_ranks, num_replicas=num_replicas, is_ordered=is_ordered)
        *reduced, between, home = world.gradient_legs(Tier.HOST, num_ranks * nbytes, is_resident=False)
        assert between.route.name == DEVICE_LINKS
        assert between.seconds == pytest.approx(0.03 * times)
        assert between.nbytes == pytest.approx(times * nbytes)
        assert (home.route.name, home.nbytes) == ("device -> host", nbytes)
        # In the shard group everything is as without replicas.
        alone = World(hardware=DGX2, num_ranks=num_ranks)
        assert (*reduced, home) == alone.gradient_legs(Tier.HOST, num_ranks * nbytes, is_resident=False)
        assert world.gather_legs(Tier.NVME, 1600) == alone.gather_legs(Tier.NVME, 1600)


def test_a_resident_of_replicas_passes_between_them_once() -> None:
    """Inside the group it comes back to all ranks after its update; the other replicas update the same rows."""
    world = World(hardware=DGX2.with_world(16, 2), num_ranks=16, num_replicas=2)
    legs = world.gradient_legs(Tier.DEVICE, 1600, is_resident=True)
    assert [(leg.route.name, leg.nbytes) for leg in legs] == [(DEVICE_LINKS, 3200), (NODE_LINKS, 200)]


def test_one_rank_has_no_links_to_go_over() -> None:
    world = World(hardware=DGX2, num_ranks=1)
    assert [leg.route.name for leg in world.gather_legs(Tier.NVME, 1600)] == ["nvme -> device"]
    assert [leg.nbytes for leg in world.gradient_legs(Tier.HOST, 1600, is_resident=True)] == [1600]
    assert world.gradient_legs(Tier.DEVICE, 1600, is_resident=True) == ()


@pytest.mark.parametrize(
    ("data", "tensor", "stages", "num_nodes"),
    [
        ((1, 1), 16, 1, 1),
        ((2, 1), 4, 2, 1),
        ((4, 2), 8, 4, 16),
        ((1, 1), 16, 3, 3),
        ((64, 1), 4, 1, 16),
        ((1, 1), 1, 3, 1),
    ],
)
def test_meshes_fill_nodes(data: tuple[int, int], tensor: int, stages: int, num_nodes: int) -> None:
    assert DGX2.with_mesh(*data, num_tensor_ranks=tensor, num_stages=stages) == replace(DGX2, num_nodes=num_nodes)


@pytest.mark.parametrize(
    ("data", "tensor", "stages", "message"),
    [
        (
            (1, 1),
            32,
            1,
            r"32 tensor-parallel ranks do not share a node of dgx2 evenly, which has 16 devices; .*: give 16",
        ),
        ((1, 1), 6, 1, r"6 tensor-parallel ranks do not share a node of dgx2 evenly, .*: give 4"),
        ((3, 1), 4, 4, r"stages of 12 ranks are spread unevenly over nodes of dgx2, which have 16 devices each"),
        ((1, 1), 4, 5, r"20 ranks do not fill whole nodes of dgx2, which have 16 devices each; give 80 ranks"),
    ],
)
def test_impossible_meshes_are_refused(data: tuple[int, int], tensor: int, stages: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        DGX2.with_mesh(*data, num_tensor_ranks=tensor, num_stages=stages)


def test_ranks_of_one_tensor_parallel_group_share_the_node_links() -> None:
    """Four groups of four fill a node: of each of four worlds it has four ranks, and each world a fourth of its links."""
    hardware = DGX2.with_mesh(16, num_tensor_ranks=4)
    links = World(hardware=hardware, num_ranks=16, num_tensor_ranks=4).links
    assert (links.name, links.bytes_per_second) == (NODE_LINKS, 100e9 / 4 * 4 / 3)
    inside = World(hardware=DGX2.with_mesh(4, num_tensor_ranks=4), num_ranks=4, num_tensor_ranks=4).links
    assert (inside.name, inside.bytes_per_second) == (DEVICE_LINKS, 70e9 * 4 / 3)
    between = World(hardware=hardware, num_ranks=4, num_replicas=4, num_tensor_ranks=4).replica_links
    assert (between.name, between.bytes_per_second) == (NODE_LINKS, 100e9 / 16)
