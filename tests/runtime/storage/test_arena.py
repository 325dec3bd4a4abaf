"""The device arena: every byte belongs to one transfer at a time."""

import pytest
import torch

from zinf_compile.ir.errors import VerifyError
from zinf_compile.runtime.storage.arena import Arena

PAGE = 4096


def test_memory_is_page_aligned_and_grows_only() -> None:
    arena = Arena()
    assert arena.nbytes == 0
    arena.reserve(0)
    arena.reserve(3 * PAGE)
    assert arena.view(PAGE, (4,), torch.float32).data_ptr() % PAGE == 0
    arena.reserve(PAGE)
    assert arena.nbytes == 3 * PAGE
    arena.reserve(5 * PAGE)
    assert arena.nbytes == 5 * PAGE
    arena.check_integrity(expect_idle=True)


def test_memory_is_dropped_when_nothing_is_taken() -> None:
    arena = Arena()
    arena.reserve(2 * PAGE)
    view = arena.view(0, (4,), torch.float32).fill_(3.0)
    arena.take(0, PAGE)
    with pytest.raises(VerifyError, match=f"the arena cannot be dropped while {PAGE} of its bytes are taken"):
        arena.drop()
    arena.give_back(0)
    arena.drop()
    assert arena.nbytes == 0
    assert (view == 3.0).all(), "a view keeps its memory alive"
    arena.reserve(PAGE)
    assert arena.nbytes == PAGE


def test_views_and_buffers_are_the_same_bytes() -> None:
    arena = Arena()
    arena.reserve(2 * PAGE)
    view = arena.view(PAGE, (2, 3), torch.bfloat16)
    arena.buffer(PAGE, 12)[:] = bytes(12)
    view.fill_(1.0)
    assert bytes(arena.buffer(PAGE, 12)) == b"\x80\x3f" * 6
    assert view.shape == (2, 3)
    assert len(arena.buffer(0, 2 * PAGE)) == 2 * PAGE


def test_a_view_of_a_scalar_and_of_nothing() -> None:
    arena = Arena()
    arena.reserve(PAGE)
    assert arena.view(0, (), torch.float32).dim() == 0
    assert arena.view(0, (0, 5), torch.float32).numel() == 0


@pytest.mark.parametrize("offset", [0, 1, PAGE, 2 * PAGE - 1])
def test_taken_bytes_are_not_handed_out_again(offset: int) -> None:
    arena = Arena()
    arena.reserve(4 * PAGE)
    arena.take(0, 2 * PAGE)
    with pytest.raises(VerifyError, match=rf"arena bytes \[{offset}, {offset + PAGE}\) are taken by \[0, 8192\)"):
        arena.take(offset, PAGE)
    arena.take(2 * PAGE, 2 * PAGE)
    assert arena.taken_nbytes == 4 * PAGE
    arena.check_integrity()
    arena.give_back(0)
    arena.take(PAGE, PAGE)
    arena.check_integrity()


@pytest.mark.parametrize(("offset", "nbytes"), [(-1, 1), (0, PAGE + 1), (PAGE, 1)])
def test_bytes_outside_are_refused(offset: int, nbytes: int) -> None:
    arena = Arena()
    arena.reserve(PAGE)
    with pytest.raises(VerifyError, match="lie outside its 4096"):
        arena.take(offset, nbytes)


def test_give_back_of_what_was_not_taken() -> None:
    arena = Arena()
    arena.reserve(PAGE)
    arena.take(0, PAGE)
    arena.give_back(0)
    with pytest.raises(VerifyError, match="no arena bytes are taken at offset 0"):
        arena.give_back(0)


def test_growing_under_a_transfer_is_refused() -> None:
    arena = Arena()
    arena.reserve(PAGE)
    arena.take(0, PAGE)
    arena.reserve(PAGE)
    with pytest.raises(VerifyError, match="cannot grow to 8192 bytes while 4096 are taken"):
        arena.reserve(2 * PAGE)


def test_growing_leaves_older_views_valid() -> None:
    arena = Arena()
    arena.reserve(PAGE)
    view = arena.view(0, (4,), torch.int64).fill_(7)
    arena.reserve(64 * PAGE)
    assert view.tolist() == [7] * 4


def test_what_is_left_taken_is_found() -> None:
    arena = Arena()
    arena.reserve(2 * PAGE)
    arena.take(PAGE, PAGE)
    arena.check_integrity()
    with pytest.raises(VerifyError, match="1 arena ranges are still taken, the first at offset 4096"):
        arena.check_integrity(expect_idle=True)
