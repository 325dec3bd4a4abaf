"""Errors that pass between ranks keep their class, text, numbers and notes."""

import pickle

import pytest

from zinf_compile.ir.errors import CapacityError, DamageError, DeviceCapacityError, StoreError, ZinfError


@pytest.mark.parametrize(
    "error",
    [
        DeviceCapacityError("too much", needed_nbytes=3, activations_nbytes=2, waiting_helps=True),
        DamageError("other bytes", is_named=True),
        CapacityError("too much"),
        StoreError("first line", "second line"),
    ],
)
def test_a_pickled_error_is_the_same(error: ZinfError) -> None:
    error.add_note("a note")
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is type(error)
    assert str(copy) == str(error)
    assert vars(copy) == vars(error)
    assert copy.__notes__ == ["a note"]
