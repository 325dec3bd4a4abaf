"""Waiting for several calls in flight, and what is done once the last of them is."""

import itertools
from collections.abc import Callable, Sequence
from concurrent.futures import Future

from zinf_compile.ir.errors import ZinfError
from zinf_compile.runtime.process.waiting import Gone, wait_future
from zinf_compile.runtime.storage.staging import StagingBuffer, StagingPool


def wait_all(futures: Sequence[Future[None]], what: str, *, gone: Gone | None = None) -> None:
    """Wait for all futures, then raise the first error among them: nothing is in flight when this returns.

    Messages of a wait that takes long name ``what`` is waited for.
    """
    errors = [error for future in futures if (error := wait_future(future, what, gone=gone)) is not None]
    if errors:
        raise errors[0]


def call_when_done(futures: Sequence[Future[None]], call: Callable[[BaseException | None], None]) -> None:
    """Call ``call`` with the first error, or None, when the last of ``futures`` is done; at once if all are."""
    if not futures:
        call(None)
        return
    num_futures = len(futures)  # not the list itself: futures keep their callbacks, and would so keep each other
    done = itertools.count(1)  # callbacks come from different threads, and next() on a count is atomic
    errors: list[BaseException] = []

    def count_down(future: Future[None]) -> None:
        if (error := future.exception(timeout=0)) is not None:
            errors.append(error)
        if next(done) == num_futures:
            call(errors[0] if errors else None)

    for future in futures:
        future.add_done_callback(count_down)


def then_start(after: Sequence[Future[None]], start: Callable[[], Sequence[Future[None]]]) -> Future[None]:
    """Call ``start`` when all of ``after`` are done; return a future that is done when all that it began is.

    It has the first error, of ``after``, of ``start`` or of what that began.
    """
    ended: Future[None] = Future()

    def end(error: BaseException | None) -> None:
        if error is None:
            ended.set_result(None)
        else:
            ended.set_exception(error)

    def go(error: BaseException | None) -> None:
        if error is not None:
            ended.set_exception(error)
            return
        try:
            begun = start()
        except (ZinfError, RuntimeError) as refused:  # a pool that was shut down, say: who waits must hear of it
            ended.set_exception(refused)
        else:
            call_when_done(begun, end)

    call_when_done(after, go)
    return ended


def return_when_done(
    staging: StagingPool, lease: StagingBuffer, futures: Sequence[Future[None]], *, holds: object | None = None
) -> None:
    """Return a staging buffer when the last of its calls is done, whether they succeed or not.

    If they did, with a note of what it holds.
    """
    call_when_done(futures, lambda error: staging.return_(lease, holds=holds if error is None else None))
