"""Copies: sizes are those of torch, and sizes of state follow its granularity."""

from dataclasses import replace

import pytest
import torch

from tests.support.planner_inputs import make_parameter
from zinf_compile.ir.copies import (
    COMPUTE,
    GRADIENT,
    MASTER,
    Copy,
    CopyKey,
    Encoding,
    Granularity,
    Role,
    StateSpec,
    state_key,
)
from zinf_compile.ir.glossary import Tier
from zinf_compile.ir.plan import Placement
from zinf_compile.ir.slices import Slice
from zinf_compile.passes.planner.placement.homes import make_placement

FLOAT32 = Encoding(dtype="float32")
WEIGHT = Slice.of_whole("weight", (8, 6))
EVERYWHERE = {Role.COMPUTE: Tier.DEVICE, Role.MASTER: Tier.HOST, Role.GRADIENT: Tier.HOST, Role.STATE: Tier.NVME}


def dtypes() -> dict[str, torch.dtype]:
    return {
        str(value).removeprefix("torch."): value for value in vars(torch).values() if isinstance(value, torch.dtype)
    }


def test_item_sizes_are_those_of_torch() -> None:
    for name, dtype in dtypes().items():
        if Encoding(dtype=name).is_known:
            assert Encoding(dtype=name).itemsize == dtype.itemsize, name
    assert {"float64", "float32", "bfloat16", "float16", "float8_e4m3fn", "uint8", "int8", "bool"} <= dtypes().keys()
    assert [name for name in dtypes() if not Encoding(dtype=name).is_known] == []
    assert not Encoding(dtype="float31").is_known


def state(granularity: Granularity, *shape: int) -> StateSpec:
    return StateSpec(name="state", shape=shape, encoding=FLOAT32, granularity=granularity)


@pytest.mark.parametrize(
    ("spec", "of_whole", "of_halves", "of_rank"),
    [
        (state(Granularity.ELEMENT, 8, 6), 48, [24, 24], 18),  # ranks divide rows: three of eight
        (state(Granularity.ROW, 8, 1), 8, [4, 4], 3),
        (state(Granularity.MATRIX, 1, 6), 6, [6, 0], 6),
        (state(Granularity.SCALAR, 1), 1, [1, 0], 1),
    ],
)
def test_state_of_a_part(spec: StateSpec, of_whole: int, of_halves: list[int], of_rank: int) -> None:
    assert spec.num_elements_of(WEIGHT) == of_whole
    assert [spec.num_elements_of(half) for half in WEIGHT.split(2)] == of_halves
    assert spec.num_elements_of(WEIGHT.among(3)) == of_rank


def test_a_copy_has_the_bytes_of_its_encoding_and_slice() -> None:
    copy = Copy(role=Role.COMPUTE, encoding=Encoding(dtype="bfloat16"), slice=WEIGHT.part(0, 3), tier=Tier.HOST)
    assert (copy.nbytes, copy.key) == (36, COMPUTE)
    spec = replace(state(Granularity.ROW, 8, 1), name="row_var")
    copy = Copy(role=Role.STATE, encoding=FLOAT32, slice=WEIGHT, tier=Tier.HOST, state=spec)
    assert (copy.nbytes, copy.key) == (32, state_key("row_var"))


@pytest.mark.parametrize("key", [COMPUTE, MASTER, GRADIENT], ids=str)
def test_state_of_any_name_has_a_key_of_its_own(key: CopyKey) -> None:
    assert {key: 1, state_key(key.label): 2, state_key(key.role): 3}[key] == 1


def test_a_placement_answers_from_its_copies() -> None:
    placement = make_placement(make_parameter("weight", 1000, compute_dtype="bfloat16"), EVERYWHERE)
    states = [state_key("state_0"), state_key("state_1")]
    assert [copy.key for copy in placement.copies] == [COMPUTE, MASTER, GRADIENT, *states]
    assert [placement.nbytes_on(tier) for tier in Tier] == [2000, 6000, 8000]
    assert placement.file_nbytes == 2 * 4096  # each state starts in its own sector
    assert (placement.update_nbytes_read, placement.update_nbytes_written) == (8000, 8000)
    assert (placement.update_nbytes_to_device, placement.update_nbytes_to_host) == (14_000, 12_000)


@pytest.mark.parametrize(("num_states", "sectors"), [(0, 0), (1, 1), (2, 2), (3, 3)])
def test_the_file_has_sectors_for_the_states_there_are(num_states: int, sectors: int) -> None:
    fact = make_parameter("weight", 1000, num_states=num_states)
    assert make_placement(fact, EVERYWHERE).file_nbytes == sectors * 4096


def test_one_copy_is_both_what_moves_and_what_is_updated() -> None:
    placement = make_placement(make_parameter("weight", 1000), dict.fromkeys(Role, Tier.NVME))
    assert Role.MASTER not in placement.by_role
    assert placement.master is placement.compute is Tier.NVME
    assert (placement.update_nbytes_read, placement.update_nbytes_written) == (16_000, 12_000)


def test_a_frozen_parameter_has_neither_gradient_nor_state() -> None:
    placement = make_placement(make_parameter("weight", 1000, trainable=False), EVERYWHERE)
    assert set(placement.by_role) == {Role.COMPUTE}
    assert (placement.gradient, placement.optimizer_state, placement.gradient_dtype) == (None, None, None)
    assert placement.update_nbytes_read == placement.update_nbytes_written == 0


def test_equal_placements_are_equal_whatever_was_asked_of_them() -> None:
    def make() -> Placement:
        return make_placement(make_parameter("weight", 1000), EVERYWHERE)

    asked = make()
    assert asked.nbytes_on(Tier.HOST) > 0
    assert asked == make()
    assert hash(asked) == hash(make())
    assert asked.moved({Role.STATE: Tier.HOST}).nbytes_on(Tier.NVME) == 0
