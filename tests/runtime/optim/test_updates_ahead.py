"""Which update begins next; ``tests/parity/test_updates_ahead.py`` has what they change for users: nothing."""

from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

from zinf_compile.runtime.optim.updates_ahead import UpdatesAhead


def test_the_newest_whose_gradient_is_home_begins_first() -> None:
    class Store:
        """What holds the updates weakly."""

    store: Any = Store()
    ahead = UpdatesAhead(store)
    homes: list[Future[None]] = [Future() for _ in range(5)]
    queue: Any = ahead._queue
    queue.extend(SimpleNamespace(name=name, job=SimpleNamespace(after=[home])) for name, home in enumerate(homes))

    def begin() -> Any:
        begun: Any = ahead._next()
        return None if begun is None else begun.name

    assert begin() == 0  # none is home: the first will be
    homes[1].set_result(None)
    homes[3].set_result(None)
    assert begin() == 3
    assert begin() == 1
    homes[2].set_result(None)
    assert begin() == 2
    assert begin() == 4
    assert begin() is None
