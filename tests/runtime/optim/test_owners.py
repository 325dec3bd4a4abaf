"""How whole-tensor updates are dealt out to ranks."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from zinf_compile.runtime.optim.owners import Load, deal_out

LOADS = st.lists(st.builds(Load, st.integers(0, 100), st.integers(0, 10)), max_size=30)


@given(loads=LOADS, num_ranks=st.integers(1, 5), room=st.integers(10, 40))
def test_every_load_has_one_owner_and_rounds_are_bounded(loads: list[Load], num_ranks: int, room: int) -> None:
    rounds = deal_out(loads, num_ranks, room)
    assert sorted(number for each in rounds for number, _ in each) == list(range(len(loads)))
    for each in rounds:
        owned: Counter[int] = Counter()
        for number, owner in each:
            assert 0 <= owner < num_ranks
            owned[owner] += loads[number].whole_nbytes
        assert max(owned.values()) <= max(load.whole_nbytes for load in loads)
        assert sum(loads[number].staged_nbytes for number, _ in each) <= room


def test_equal_loads_are_updated_side_by_side() -> None:
    rounds = deal_out([Load(8, 1)] * 6, 3, 100)
    assert [[owner for _, owner in each] for each in rounds] == [[0, 1, 2], [0, 1, 2]]


def test_small_loads_share_a_round_with_large_ones_where_there_is_room() -> None:
    loads = [Load(1, 1), Load(9, 1), Load(8, 1), *[Load(1, 1)] * 7]
    assert [[tuple(each) for each in round_] for round_ in deal_out(loads, 3, 100)] == [
        [(1, 0), (2, 1), *((number, 2) for number in (0, 3, 4, 5, 6, 7, 8, 9))]
    ]
    assert len(deal_out(loads, 3, 5)) == 2


def test_what_one_round_gives_too_much_the_next_makes_up_for() -> None:
    rounds = deal_out([Load(9, 1), Load(8, 1), Load(7, 1), Load(7, 1)], 2, 2)
    assert rounds == [[(0, 0), (1, 1)], [(2, 1), (3, 0)]]
