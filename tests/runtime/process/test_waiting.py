"""Waits log what they wait for, and raise when it cannot come; the package waits only through this helper."""

import ast
import logging
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

import zinf_compile
from zinf_compile.ir.errors import StoreError
from zinf_compile.runtime.process import waiting

PACKAGE = Path(zinf_compile.__file__).parent
# Calls that wait forever unless they get a timeout.
_ENDLESS = {"wait", "wait_for", "result", "exception", "join", "get", "acquire"}
# Device events, which have no timeout, messages between ranks and collectives of users, which have that of their group; and
# waits through the helper under the same name.
_ALLOWED = (
    *(
        "copy.event",
        "moving.mark",
        "work",
        "grad",
        "origin",
        "timed.start",
        "timed.end",
        "compute.record()",
        "file_offset=offset)",
    ),
    *("self.updates", "self._updates", "self.background_work", "gather", "piece.ended"),
)
_MODULES = ("waiting.py", "cuda.py", "device_updates.py")  # the helper, and what enqueues waits on streams


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let waits poll at once, and log after a tenth of a second."""
    monkeypatch.setattr(waiting, "_REST_SECONDS", 0.02)
    monkeypatch.setattr(waiting, "SILENT_SECONDS", 0.1)


@pytest.mark.usefixtures("impatient")
def test_a_long_wait_says_for_what_again_and_again(caplog: pytest.LogCaptureFixture) -> None:
    future: Future[None] = Future()

    class EndAfterThree(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            spoken.append(record.getMessage())
            if len(spoken) == 3:
                future.set_result(None)

    spoken: list[str] = []
    handler = EndAfterThree()
    logging.getLogger(waiting.__name__).addHandler(handler)
    try:
        assert waiting.wait_future(future, "a read of 'weight'") is None
    finally:
        logging.getLogger(waiting.__name__).removeHandler(handler)
    assert all(sentence.startswith("a read of 'weight': waiting for") for sentence in spoken)
    assert len(spoken) == 3


@pytest.mark.usefixtures("impatient")
def test_a_wait_for_what_will_not_come_is_an_error() -> None:
    with pytest.raises(StoreError, match=r"^the update of 'w' cannot be waited for any longer: its thread has ended$"):
        waiting.wait_future(Future(), "the update of 'w'", gone=lambda: "its thread has ended")
    condition = threading.Condition()
    with condition, pytest.raises(StoreError, match=r"^room cannot be waited for any longer: nobody gives any$"):
        waiting.wait_until(condition, lambda: False, "room", gone=lambda: "nobody gives any")


def test_a_pool_without_threads_is_gone() -> None:
    pool = ThreadPoolExecutor(1)
    pool.submit(int)
    assert waiting.why_pool_is_gone(pool) is None
    waiting.end_pool(pool, "calls")
    assert waiting.why_pool_is_gone(pool) == "its threads have ended"


def test_a_time_limit_holds() -> None:
    condition = threading.Condition()
    with condition:
        assert not waiting.wait_until(condition, lambda: False, "nothing", timeout=0.01)


def _endless_calls(path: Path) -> list[str]:
    """Return the calls of a module that wait without a timeout and not through the helper."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        name, owner = node.func.attr, ast.unparse(node.func.value)
        keywords = {keyword.arg for keyword in node.keywords}
        is_limited = bool(keywords & {"timeout", "timeout_seconds"}) or "blocking=False" in ast.unparse(node)
        if name == "wait_for" or (name in _ENDLESS and not node.args and not is_limited):
            if not owner.endswith(_ALLOWED):
                found.append(f"{path.name}:{node.lineno} {owner}.{name}()")
        elif name == "shutdown" and not any(ast.unparse(keyword) == "wait=False" for keyword in node.keywords):
            found.append(f"{path.name}:{node.lineno} {owner}.shutdown()")
    return found


def test_nobody_waits_without_a_limit_but_by_the_helper() -> None:
    folders = [PACKAGE, PACKAGE / "runtime", PACKAGE / "passes"]  # symlinks, which rglob does not follow
    modules = {path for folder in folders for path in folder.rglob("*.py") if path.name not in _MODULES}
    assert [call for path in sorted(modules) for call in _endless_calls(path)] == []


def test_an_endless_wait_would_be_found(tmp_path: Path) -> None:
    module = tmp_path / "module.py"
    module.write_text(
        "future.result()\nevent.wait(timeout=1)\n', '.join(names)\nqueue.get()\npool.shutdown(wait=True)\n"
    )
    assert _endless_calls(module) == [
        "module.py:1 future.result()",
        "module.py:4 queue.get()",
        "module.py:5 pool.shutdown()",
    ]
