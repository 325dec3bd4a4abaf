"""A headless browser, spoken to in the DevTools protocol over its pipe: no library of drivers, no port."""

import base64
import fcntl
import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

_SECONDS = 60.0  # a browser that says nothing for so long has hung
_NAMES = ("chromium", "chromium-browser", "google-chrome")


class Browser:
    """One browser with one page. ``problems`` are uncaught errors and what the console has of warnings and errors."""

    def __init__(self, program: str, profile: Path) -> None:
        to_browser, self._write = os.pipe()
        self._read, from_browser = os.pipe()
        # The browser has its pipe at 3 and 4. These must not be among what the shell moves there.
        ends = [fcntl.fcntl(end, fcntl.F_DUPFD, 10) for end in (to_browser, from_browser)]
        command = [
            *("bash", "-c", f'exec "$@" 3<&{ends[0]} 4>&{ends[1]}', "bash", program, "--headless=new"),
            *("--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars", "--no-first-run"),
            *("--remote-debugging-pipe", f"--user-data-dir={profile}", "about:blank"),
        ]
        self._process = subprocess.Popen(command, pass_fds=ends, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        for end in (to_browser, from_browser, *ends):
            os.close(end)
        self._received = b""
        self._num_sent = 0
        self.problems: list[str] = []
        self.requests: list[str] = []
        self._events: list[str] = []
        targets = self._call("Target.getTargets")["targetInfos"]
        target = next(each["targetId"] for each in targets if each["type"] == "page")
        self._session = self._call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: object) -> Any:
        """Return the result of a command to the page."""
        return self._call(method, session=self._session, **params)

    def open(self, page: Path, *, width: int, height: int = 900, is_dark: bool = False, is_phone: bool = False) -> None:
        """Load a page, and wait until it has loaded, its charts are there, and it has drawn twice."""
        self.problems.clear()
        self.requests.clear()
        self._events.clear()
        scheme = {"name": "prefers-color-scheme", "value": "dark" if is_dark else "light"}
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=is_phone
        )
        self.call("Emulation.setTouchEmulationEnabled", enabled=is_phone)
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.call("Page.navigate", url=page.as_uri())
        while "Page.loadEventFired" not in self._events:
            self._receive()
        self.ask("Promise.resolve(window.drawn).then(() => 0)")
        self.ask("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")

    def ask(self, expression: str) -> Any:
        """Return the value of a JavaScript expression, or of the promise that it is."""
        found = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def wait_for(self, condition: str) -> None:
        """Wait until a JavaScript expression is true."""
        self.ask(f"new Promise(done => {{ const look = () => {condition} ? done() : setTimeout(look, 20); look(); }})")

    def picture(self, path: Path) -> None:
        """Write a picture of the whole page."""
        size = self.call("Page.getLayoutMetrics")["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}
        shot = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=True, clip=clip)
        path.write_bytes(base64.b64decode(shot["data"]))

    def close(self) -> None:
        """End the browser."""
        self._process.terminate()
        self._process.wait(timeout=_SECONDS)
        os.close(self._read)
        os.close(self._write)

    def _call(self, method: str, *, session: str | None = None, **params: object) -> Any:
        self._num_sent += 1
        number = self._num_sent
        message: dict[str, object] = {"id": number, "method": method, "params": params}
        if session is not None:
            message["sessionId"] = session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("id") == number:
                assert "error" not in answer, answer["error"]
                return answer["result"]

    def _receive(self) -> dict[str, Any]:
        end = time.monotonic() + _SECONDS
        poll = select.poll()  # select takes descriptors below 1024 only
        poll.register(self._read, select.POLLIN)
        while b"\0" not in self._received:
            ready = poll.poll(1000 * max(0.0, end - time.monotonic()))
            assert ready, f"the browser has said nothing for {_SECONDS:.0f} s"
            piece = os.read(self._read, 1 << 20)
            assert piece, "the browser has gone"
            self._received += piece
        text, _, self._received = self._received.partition(b"\0")
        message: dict[str, Any] = json.loads(text)
        self._note(message.get("method", ""), message.get("params", {}))
        return message

    def _note(self, event: str, params: dict[str, Any]) -> None:
        self._events.append(event)
        if event == "Runtime.exceptionThrown":
            self.problems.append(json.dumps(params["exceptionDetails"]))
        elif event == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning", "assert"):
            self.problems.append(json.dumps(params["args"]))
        elif event == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            self.problems.append(params["entry"]["text"])
        elif event == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])


@pytest.fixture(scope="session")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """Return a headless browser; tests that need one are skipped where there is none."""
    program = next(filter(None, map(shutil.which, _NAMES)), None)
    if program is None:
        pytest.skip("there is no chromium on this machine (Debian: apt-get install chromium)")
    browser = Browser(program, tmp_path_factory.mktemp("chromium"))
    yield browser
    browser.close()
