"""Homes: copies with the most moves per byte get the fastest tier that has room."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.examples import examples
from zinf_compile.ir.config import Config
from zinf_compile.ir.copies import Encoding, Granularity, Role, StateSpec, element_states
from zinf_compile.ir.errors import CapacityError
from zinf_compile.ir.facts import UseFact
from zinf_compile.ir.glossary import Tier
from zinf_compile.ir.plan import Placement
from zinf_compile.ir.tiles import TiledParameters, cut_rows, join_placements
from zinf_compile.passes.planner.cost.costs import RESIDENT_THRESHOLD
from zinf_compile.passes.planner.placement.budgets import check_budgets
from zinf_compile.passes.planner.placement.homes import (
    MIN_STAGING,
    place_narrowed,
    place_states,
    place_unfrozen,
    plan_placement,
)
from zinf_compile.passes.planner.search.planner import Request

Function = Callable[..., Any]
DEVICE, HOST, NVME = Tier.DEVICE, Tier.HOST, Tier.NVME
ELEMENTS = 100_000  # 400 000 bytes per copy: large enough to be streamed
NBYTES = 4 * ELEMENTS


def make_config(device: int, host: int, *, nvme: str | None = "/disk", nvme_memory: int | None = None) -> Config:
    """Return a config with ``host`` bytes of host memory besides staging."""
    config = Config(device_memory=device, host_memory=2 * host, nvme=nvme, nvme_memory=nvme_memory)
    assert config.host_memory - config.staging_memory == host
    return config


def use_of(name: str, num_ticks: int) -> UseFact:
    return UseFact(parameter=name, dtype="float32", ticks=tuple(range(num_ticks)))


def homes(placement: Placement) -> tuple[Tier, Tier, Tier, Tier]:
    return placement.compute, placement.master, placement.gradient, placement.optimizer_state


def test_the_host_fills_by_role(parameter: Function) -> None:
    parameters = [parameter(f"{name}.weight", ELEMENTS, compute_dtype="bfloat16") for name in "ab"]
    half = NBYTES // 2  # of a compute copy or a gradient; a master takes NBYTES, two moments twice that
    for room, expected in (
        (0, (NVME, NVME, NVME, NVME)),
        (2 * half, (HOST, NVME, NVME, NVME)),
        (4 * half, (HOST, NVME, HOST, NVME)),
        (4 * half + 2 * NBYTES, (HOST, HOST, HOST, NVME)),
        (4 * half + 6 * NBYTES, (HOST, HOST, HOST, HOST)),
    ):
        for placement in plan_placement(parameters, make_config(0, room)):
            assert homes(placement) == expected


def test_one_copy_is_compute_and_master_at_once(parameter: Function) -> None:
    (placement,) = plan_placement([parameter("a.weight", ELEMENTS)], make_config(0, NBYTES))
    assert homes(placement) == (HOST, HOST, NVME, NVME)
    assert placement.master_nbytes == 0


def test_what_a_unfrozen_parameter_needs_goes_where_the_others_leave_room(parameter: Function) -> None:
    unfrozen = parameter("a.weight", ELEMENTS, compute_dtype="bfloat16")
    half = NBYTES // 2
    for room, expected in (
        (half, (NVME, NVME, NVME, NVME)),
        (2 * half, (NVME, NVME, HOST, NVME)),
        (2 * half + NBYTES, (NVME, HOST, HOST, NVME)),
        (2 * half + 3 * NBYTES, (NVME, HOST, HOST, HOST)),
    ):
        config = make_config(0, room)
        other = plan_placement([parameter("b.weight", ELEMENTS // 2, trainable=False)], make_config(0, half))
        assert [homes(placement)[0] for placement in other] == [HOST]
        assert homes(place_unfrozen(unfrozen, NVME, other, config)) == expected
    with pytest.raises(CapacityError, match="nvme_memory is 10 B"):
        place_unfrozen(unfrozen, NVME, other, make_config(0, 0, nvme_memory=10))


def test_a_narrower_copy_takes_the_place_of_the_only_one(parameter: Function) -> None:
    """The compute copy takes the only copy's place. The master copy goes to the host while it has room, else to nvme."""
    facts = [parameter(f"{name}.weight", ELEMENTS) for name in "abc"]
    narrowed = [fact.narrowed_to("bfloat16") for fact in facts[:2]] + facts[2:]
    for room, compute, expected in (
        (0, NVME, [(NVME, NVME), (NVME, NVME), (NVME, NVME)]),
        (NBYTES, DEVICE, [(DEVICE, HOST), (DEVICE, NVME), (DEVICE, DEVICE)]),
        (5 * NBYTES, HOST, [(HOST, HOST), (HOST, HOST), (HOST, HOST)]),
    ):
        config = make_config(0, room)
        old = [
            item.moved(dict.fromkeys(Role, NVME) | {Role.COMPUTE: compute}) for item in plan_placement(facts, config)
        ]
        placed = place_narrowed(narrowed, old, config)
        assert [homes(item)[:2] for item in placed] == expected
        assert [item.compute_nbytes for item in placed] == [NBYTES // 2, NBYTES // 2, NBYTES]
        assert [item.master_nbytes for item in placed] == [NBYTES, NBYTES, 0]
        assert {item.gradient_dtype for item in placed} == {"float32"}
        assert placed[2] == old[2]


def with_matrix(fact: Any, elements: int) -> Any:
    """Return a fact whose optimizer keeps a matrix of so many elements beside what it had."""
    matrix = StateSpec(
        name="matrix", shape=(elements,), encoding=Encoding(dtype="float32"), granularity=Granularity.MATRIX
    )
    return replace(fact, states=(*fact.states, matrix))


def test_more_state_than_was_assumed_stays_with_the_other_or_goes_to_nvme(parameter: Function) -> None:
    facts = [parameter(f"{name}.weight", ELEMENTS) for name in "ab"]
    grown = [with_matrix(facts[0], ELEMENTS), with_matrix(facts[1], 2 * ELEMENTS)]
    everything = 8 * NBYTES  # compute copies, gradients and two moments of both
    for room, expected in (
        (everything + 3 * NBYTES, (HOST, HOST)),
        (everything + 2 * NBYTES, (HOST, NVME)),  # the larger one goes
        (everything, (HOST, NVME)),
        (everything - 4 * NBYTES, (NVME, NVME)),
    ):
        config = make_config(0, room)
        old = [item.moved(dict.fromkeys(Role, HOST)) for item in plan_placement(facts, config)]
        placed = place_states(grown, old, config)
        assert tuple(item.optimizer_state for item in placed) == expected, room
        assert [item.optimizer_state_nbytes for item in placed] == [3 * NBYTES, 4 * NBYTES]
        assert [item.compute_nbytes for item in placed] == [NBYTES, NBYTES]
        assert all(item.has_whole_state and not item.may_update_ahead(NVME) for item in placed)
    assert not any(item.has_whole_state for item in old)


def test_state_that_staging_cannot_hold_at_once_stays_in_host_memory(parameter: Function) -> None:
    facts = [parameter(f"{name}.weight", ELEMENTS) for name in "ab"]
    grown = [with_matrix(facts[0], ELEMENTS), with_matrix(facts[1], 600 * ELEMENTS)]
    config = Config(device_memory=0, host_memory=2000 * NBYTES, nvme="/disk", nvme_memory=None)
    assert config.staging_memory < 600 * NBYTES
    old = [item.moved(dict.fromkeys(Role, NVME)) for item in plan_placement(facts, config)]
    assert tuple(item.optimizer_state for item in place_states(grown, old, config)) == (NVME, HOST)
    with pytest.raises(CapacityError, match="whose updates staging cannot hold"):
        place_states(grown, old, replace(config, host_memory=1000 * NBYTES))


def test_other_copies_leave_where_state_has_to_stay(parameter: Function) -> None:
    facts, matrix = [parameter(f"{name}.weight", ELEMENTS) for name in "ab"], 200 * 2**20
    grown = [with_matrix(facts[0], ELEMENTS), with_matrix(facts[1], matrix // 4)]
    room = matrix + 3 * NBYTES  # for the state of b, and one copy more
    config = Config(device_memory=0, host_memory=192 * 2**20 + room, nvme="/disk", nvme_memory=None)
    old = [item.moved(dict.fromkeys(Role, HOST)) for item in plan_placement(facts, config)]
    placed = place_states(grown, old, config)
    assert [item.optimizer_state for item in placed] == [NVME, HOST]
    assert sum(item.nbytes_on(HOST) for item in placed) == room
    assert [item.gradient for item in placed] == [NVME, NVME]


def test_other_state_that_fits_nowhere_is_refused(parameter: Function) -> None:
    fact = parameter("a.weight", ELEMENTS)
    config = make_config(0, 4 * NBYTES, nvme=None)
    (old,) = plan_placement([fact], config)
    with pytest.raises(CapacityError, match="there is no nvme folder"):
        place_states([with_matrix(fact, ELEMENTS)], [old], config)


def test_state_takes_the_home_of_the_master_copy_where_there_was_none(parameter: Function) -> None:
    fact = replace(parameter("a.weight", ELEMENTS), states=())
    old = plan_placement([fact], make_config(0, 2 * NBYTES))
    assert [item.optimizer_state for item in old] == [None]
    moments = replace(fact, states=element_states(("mean",), (ELEMENTS,), fact.master))
    for room, expected in ((3 * NBYTES, HOST), (2 * NBYTES, NVME)):
        (placed,) = place_states([moments], old, make_config(0, room))
        assert placed.optimizer_state is expected
        assert not placed.has_whole_state


def test_a_narrower_copy_without_room_is_refused(parameter: Function) -> None:
    fact = parameter("a.weight", ELEMENTS, trainable=False)
    config = make_config(0, NBYTES, nvme_memory=0)
    with pytest.raises(CapacityError, match="nvme_memory is 0 B"):
        place_narrowed([fact.narrowed_to("bfloat16")], plan_placement([fact], config), config)


def test_a_frozen_parameter_has_only_a_compute_copy(parameter: Function) -> None:
    frozen = parameter("a.weight", ELEMENTS, compute_dtype="bfloat16", trainable=False)
    (placement,) = plan_placement([frozen], make_config(0, 0))
    sizes = (placement.compute_nbytes, placement.master_nbytes, placement.gradient_nbytes)
    assert (*sizes, placement.optimizer_state_nbytes) == (2 * ELEMENTS, 0, 0, 0)
    assert placement.nbytes_on(NVME) == 2 * ELEMENTS


def test_what_is_used_more_often_comes_first(parameter: Function) -> None:
    parameters = [parameter(f"{name}.weight", ELEMENTS) for name in "abc"]
    uses = [use_of("a.weight", 2), use_of("b.weight", 4), use_of("c.weight", 2)]
    placements = plan_placement(parameters, make_config(0, NBYTES), resident_nbytes=NBYTES, uses=uses)
    assert [placement.compute for placement in placements] == [HOST, DEVICE, NVME]


def test_large_parameters_become_resident_only_once_a_graph_was_seen(parameter: Function) -> None:
    parameters = [parameter("a.weight", ELEMENTS)]
    config = make_config(100 * NBYTES, NBYTES)
    assert plan_placement(parameters, config)[0].compute is HOST
    assert plan_placement(parameters, config, resident_nbytes=NBYTES)[0].compute is DEVICE
    assert plan_placement(parameters, config, resident_nbytes=NBYTES - 1)[0].compute is HOST


def test_small_parameters_are_resident_and_keep_all_they_have_in_memory(parameter: Function) -> None:
    at_threshold = parameter("norm.weight", RESIDENT_THRESHOLD // 4)
    over = parameter("up.weight", RESIDENT_THRESHOLD // 4 + 1)
    small, large = plan_placement([at_threshold, over], make_config(2**30, 3 * RESIDENT_THRESHOLD))
    assert homes(small) == (DEVICE, DEVICE, HOST, HOST)
    assert homes(large) == (NVME, NVME, NVME, NVME)


def test_small_parameters_take_an_eighth_of_the_device_at_most(parameter: Function) -> None:
    parameters = [parameter(f"norms.{index}.weight", RESIDENT_THRESHOLD // 4) for index in range(4)]
    placements = plan_placement(parameters, make_config(8 * 2 * RESIDENT_THRESHOLD, 2**24))
    assert [placement.compute for placement in placements] == [DEVICE, DEVICE, HOST, HOST]


def test_placements_are_in_the_order_given(parameter: Function) -> None:
    parameters = [parameter(f"{name}.weight", size) for name, size in (("z", ELEMENTS), ("a", 16), ("m", ELEMENTS))]
    placements = plan_placement(parameters, make_config(2**20, 2**26), uses=[use_of("m.weight", 9)])
    assert [placement.parameter for placement in placements] == ["z.weight", "a.weight", "m.weight"]


@examples(60)
@given(seed=st.integers(0, 10**6), device=st.integers(0, 2**24), host=st.integers(0, 2**25))
def test_budgets_are_kept(request_of: Function, seed: int, device: int, host: int) -> None:
    request: Request = request_of(seed)
    config = make_config(device, host)
    for resident in (None, device):
        placements = plan_placement(request.parameters, config, resident_nbytes=resident)
        assert sum(item.nbytes_on(DEVICE) for item in placements) <= (device // 8 if resident is None else device)
        assert sum(item.nbytes_on(HOST) for item in placements) <= host
        for placement, fact in zip(placements, request.parameters, strict=True):
            total = sum(placement.nbytes_on(tier) for tier in Tier)
            assert total == fact.compute_nbytes + fact.trainable * (
                fact.master_nbytes * fact.has_compute_copy + fact.gradient_nbytes + 2 * fact.master_nbytes
            )


def test_without_a_disk_the_remedies_are_named(parameter: Function) -> None:
    with pytest.raises(CapacityError, match=r"there is no nvme folder; largest: a.weight .*; give nvme='.*', or raise"):
        plan_placement([parameter("a.weight", ELEMENTS)], make_config(0, 0, nvme=None))


def test_a_disk_that_is_too_small_is_named(parameter: Function) -> None:
    with pytest.raises(
        CapacityError, match=r"need 1.5 MiB on nvme, and nvme_memory is 1.0 MiB; .*raise nvme_memory to 2"
    ):
        plan_placement([parameter("a.weight", ELEMENTS)], make_config(0, 0, nvme_memory=2**20))


def test_the_device_must_hold_the_largest_parameter_and_its_gradient(parameter: Function) -> None:
    parameters = [parameter("a.weight", ELEMENTS), parameter("b.weight", ELEMENTS - 1)]
    tiled = make_config(2**19, 2**26)
    placements = plan_placement(parameters, tiled)
    for whole in (replace(tiled, tiles=None), replace(tiled, capture=False)):
        with pytest.raises(
            CapacityError,
            match=r"needs 784.0 KiB .*; largest: a.weight 390.6 .* device_memory to 1MiB plus activation",
        ):
            check_budgets(parameters, placements, whole)
    check_budgets(parameters, placements, tiled)
    with pytest.raises(CapacityError, match=r"largest parameter, or tile of one, .* needs 128.0 KiB"):
        check_budgets(parameters, placements, replace(tiled, device_memory=2**17 - 1))


def test_moving_to_nvme_needs_staging(parameter: Function) -> None:
    frozen = [parameter("a.weight", ELEMENTS, trainable=False)]  # no optimizer step, which would need more
    config = make_config(2**30, MIN_STAGING - 1)
    with pytest.raises(CapacityError, match=r"needs staging of 256.0 KiB; raise host_memory to 1MiB"):
        check_budgets(frozen, plan_placement(frozen, config), config)
    enough = replace(config, host_memory=2 * MIN_STAGING)
    check_budgets(frozen, plan_placement(frozen, enough), enough)


@given(
    host=st.integers(0, 40).map(lambda share: share * NBYTES // 4),
    resident=st.none() | st.integers(0, 12).map(lambda share: share * NBYTES // 4),
    num_tiles=st.integers(2, 5),
)
@examples(60, derandomize=False)
def test_tiles_have_the_homes_of_their_parameter(
    parameter: Function, host: int, resident: int | None, num_tiles: int
) -> None:
    facts = [parameter(f"{name}.weight", ELEMENTS, width=1000) for name in "abc"]
    tiled = TiledParameters({"b.weight": facts[1].slice.split(num_tiles)})
    uses = [use_of("a.weight", 2), use_of("b.weight", 2), use_of("c.weight", 3)]
    cut_uses = [uses[0], *(use_of(f"b.weight.tile_{number}", 2) for number in range(num_tiles)), uses[2]]
    config = make_config(2**30, host)
    whole = plan_placement(facts, config, resident_nbytes=resident, uses=uses)
    cut = plan_placement(tiled.cut_facts(facts), config, resident_nbytes=resident, uses=cut_uses)
    assert len(cut) == 2 + num_tiles
    assert join_placements(cut) == whole


def test_what_ranks_read_in_tiles_is_not_whole_on_each(parameter: Function) -> None:
    facts = [parameter(f"{name}.weight", ELEMENTS, width=1000) for name in "ab"]
    cut = TiledParameters({"b.weight": cut_rows(facts[1].slice, 2, 1, 3)}).cut_facts(facts)
    uses = [use_of(name, 2) for name in ("a.weight", "b.weight.tile_0", "b.weight.tile_1")]
    config = make_config(2**30, NBYTES)
    placed = plan_placement(cut, config, resident_nbytes=2**30, uses=uses, num_ranks=3)
    assert [item.compute is Tier.DEVICE for item in placed] == [True, False, False]
    assert all(copy.slice.num_ranks == 3 for item in placed[1:] for copy in item.copies)
    alone = plan_placement(cut, config, resident_nbytes=2**30, uses=uses)
    assert all(item.compute is Tier.DEVICE for item in alone)
