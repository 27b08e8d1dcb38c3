"""A page in Chromium without a window, through the pipe of its DevTools protocol."""

import json
import os
import select
import shutil
import subprocess
import time
from base64 import b64decode
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
PATIENCE_S = 60.0
OPTIONS = (
    "--headless",
    "--no-sandbox",  # root has none
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--no-first-run",
    "--remote-debugging-pipe",
)


def find() -> str | None:
    """Return the path of a browser, None where there is none."""
    return next(filter(None, map(shutil.which, NAMES)), None)


class Page:
    """A page, and what went wrong in it.

    requests: addresses that it asked for, but its own; problems: errors and warnings of the console
    """

    def __init__(self, to_browser: int, from_browser: int) -> None:
        self._out, self._in, self._rest, self._calls = to_browser, from_browser, b"", 0
        self._session: dict[str, str] = {}
        self.requests: list[str] = []
        self.problems: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = {"sessionId": attached["sessionId"]}
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")
        self.call("Network.emulateNetworkConditions", offline=True, latency=0,
                  downloadThroughput=-1, uploadThroughput=-1)  # fmt: skip

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Return the result of a method of the protocol. Raises RuntimeError, TimeoutError."""
        self._calls += 1
        message = {"id": self._calls, "method": method, "params": parameters, **self._session}
        os.write(self._out, json.dumps(message).encode() + b"\0")
        for answer in self._answers():
            if answer.get("id") == self._calls:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                return dict(answer["result"])
        raise TimeoutError(f"{method}: no answer in {PATIENCE_S:g} s")

    def _answers(self) -> Iterator[Mapping[str, Any]]:
        """Yield what the browser says until the time is up."""
        deadline = time.monotonic() + PATIENCE_S
        while (left := deadline - time.monotonic()) > 0:
            text, zero, rest = self._rest.partition(b"\0")
            if zero:
                self._rest = rest
                message = json.loads(text)
                self._note(message.get("method", ""), message.get("params", {}))
                yield message
            elif select.select([self._in], [], [], left)[0]:
                more = os.read(self._in, 1 << 20)
                if not more:
                    raise RuntimeError("the browser has ended")
                self._rest += more

    def _note(self, method: str, of: Mapping[str, Any]) -> None:
        if method == "Network.requestWillBeSent":
            self.requests.append(of["request"]["url"])
        elif method == "Runtime.exceptionThrown":
            self.problems.append(json.dumps(of["exceptionDetails"]))
        elif method == "Log.entryAdded" and of["entry"]["level"] in ("error", "warning"):
            self.problems.append(of["entry"]["text"])
        elif method == "Runtime.consoleAPICalled" and of["type"] in ("error", "warning"):
            self.problems.append(json.dumps(of["args"]))

    def resize(self, width: int, height: int) -> None:
        """Make the window so large, in pixels."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height,
                  deviceScaleFactor=1, mobile=False)  # fmt: skip

    def open(self, path: Path, width: int = 1200, height: int = 900) -> None:
        """Show a file, and wait until it is read."""
        self.resize(width, height)
        self.call("Page.navigate", url=path.resolve().as_uri())
        self.wait("location.protocol === 'file:' && document.readyState === 'complete'")

    def value(self, expression: str) -> Any:
        """Return the value of JavaScript, awaited if it is a promise."""
        found = self.call("Runtime.evaluate", expression=expression, awaitPromise=True,
                          returnByValue=True)  # fmt: skip
        if "exceptionDetails" in found:
            raise RuntimeError(f"{expression}: {found['exceptionDetails']}")
        return found["result"].get("value")

    def wait(self, expression: str) -> Any:
        """Return the value of JavaScript once it is true. Raises TimeoutError."""
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
            if found := self.value(expression):
                return found
            time.sleep(0.05)
        raise TimeoutError(f"never true: {expression}; {self.problems}")

    def mouse(self, kind: str, x: float, y: float, buttons: int = 0) -> None:
        """Move or press the mouse; kind: mouseMoved, mousePressed, mouseReleased."""
        button = "left" if buttons or kind == "mouseReleased" else "none"
        self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button=button,
                  buttons=buttons, clickCount=int(kind != "mouseMoved"))  # fmt: skip

    def click(self, x: float, y: float) -> None:
        """Click."""
        for kind, buttons in (("mouseMoved", 0), ("mousePressed", 1), ("mouseReleased", 0)):
            self.mouse(kind, x, y, buttons)

    def drag(self, x: float, y: float, to_x: float, to_y: float) -> None:
        """Drag with the left button."""
        self.mouse("mouseMoved", x, y)
        self.mouse("mousePressed", x, y, 1)
        self.mouse("mouseMoved", (x + to_x) / 2, (y + to_y) / 2, 1)
        self.mouse("mouseMoved", to_x, to_y, 1)
        self.mouse("mouseReleased", to_x, to_y)

    def picture(self, whole: bool = True) -> bytes:
        """Return the page as PNG."""
        found = self.call("Page.captureScreenshot", captureBeyondViewport=whole)
        return b64decode(found["data"])


@contextmanager
def page(profile: Path) -> Iterator[Page]:
    """Start a browser with an empty page and no network. profile: a directory of its own."""
    browser = find()
    assert browser is not None, "see find"
    read_commands, commands = os.pipe()
    answers, write_answers = os.pipe()
    process = subprocess.Popen(
        ["bash", "-c", f'exec "$0" "$@" 3<&{read_commands} 4>&{write_answers}', browser, *OPTIONS,
         f"--user-data-dir={profile}"],
        pass_fds=(read_commands, write_answers),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )  # fmt: skip
    os.close(read_commands)
    os.close(write_answers)
    try:
        yield Page(commands, answers)
    finally:
        os.close(commands)  # which ends it
        os.close(answers)
        try:
            process.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
