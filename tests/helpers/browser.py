"""A real browser without a window, driven through the Chrome DevTools protocol: `with Browser(folder) as browser: ...`."""

import base64
import itertools
import json
import os
import shutil
import subprocess
import time
import urllib.request
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

import psutil
import pytest
from websockets.sync.client import connect

NAMES = ("chromium", "chromium-browser", "google-chrome")
START_TIMEOUT_S, TIMEOUT_S = 60.0, 30.0
KEY_CODES = {"Enter": 13, "Escape": 27, "End": 35, "Home": 36, "ArrowUp": 38, "ArrowDown": 40}


def browser_program() -> str:
    """Its path; without one the test is skipped, or has failed where REQUIRE_BROWSER is set."""
    found = next(filter(None, map(shutil.which, NAMES)), None)
    if found is None:
        why = "no browser: apt-get install --no-install-recommends chromium"
        (pytest.fail if os.environ.get("REQUIRE_BROWSER") else pytest.skip)(why)
    return str(found)


class Browser:
    """One tab. What a page does unasked is noted: `dialogs` it opened, `errors` it raised, `requests` it made."""

    def __init__(self, folder: Path, width: int = 1400, height: int = 900) -> None:
        self._profile, self._open = folder / "profile", ExitStack()
        self.dialogs: list[str] = []
        self.errors: list[str] = []
        self.requests: list[str] = []
        self._numbers, self._loaded = itertools.count(1), False
        options = ["--headless=new", "--remote-debugging-port=0", f"--user-data-dir={self._profile}"]
        options += ["--no-first-run", "--disable-gpu", "--disable-dev-shm-usage", "--disable-extensions"]
        options += ["--disable-background-networking", "--disable-component-update", "--disable-sync"]
        options += [f"--window-size={width},{height}"] + ["--no-sandbox"] * (os.geteuid() == 0)
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / "browser.log").open("w") as log:
            command = [browser_program(), *options, "about:blank"]
            self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)

    def __enter__(self) -> Self:
        try:
            connection = connect(self._address(), max_size=None, open_timeout=TIMEOUT_S)
            self._socket = self._open.enter_context(connection)
            for domain in ("Page", "Runtime", "Network", "Log"):
                self.call(f"{domain}.enable")
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    def _end(self) -> None:
        over = self._process.poll() is not None
        parts = [] if over else psutil.Process(self._process.pid).children(recursive=True)
        self._open.close()
        self._process.terminate()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(10)
        for left in psutil.wait_procs(parts, timeout=10)[1]:
            left.kill()

    def _address(self) -> str:
        """Of its tab."""
        told, deadline = self._profile / "DevToolsActivePort", time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                break
            if told.exists() and (lines := told.read_text().split()):
                with urllib.request.urlopen(
                    f"http://127.0.0.1:{lines[0]}/json/list", timeout=TIMEOUT_S
                ) as answer:
                    tabs = [tab for tab in json.load(answer) if tab["type"] == "page"]
                if tabs:
                    return str(tabs[0]["webSocketDebuggerUrl"])
            time.sleep(0.05)
        log = (self._profile.parent / "browser.log").read_text()
        raise AssertionError(f"the browser did not start within {START_TIMEOUT_S:.0f} s:\n{log[-2000:]}")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """One command of the protocol, and its answer; what happened meanwhile is noted."""
        number = self._send(method, **parameters)
        deadline = time.monotonic() + TIMEOUT_S
        while True:
            message = json.loads(self._socket.recv(timeout=max(0.0, deadline - time.monotonic())))
            if message.get("id") == number:
                assert "error" not in message, f"{method}: {message['error']}"
                return message["result"]
            self._note(message)

    def _send(self, method: str, **parameters: Any) -> int:
        number = next(self._numbers)
        self._socket.send(json.dumps({"id": number, "method": method, "params": parameters}))
        return number

    def _note(self, message: dict[str, Any]) -> None:
        event, about = message.get("method"), message.get("params", {})
        if event == "Page.javascriptDialogOpening":
            self.dialogs.append(about["message"])
            self._send("Page.handleJavaScriptDialog", accept=True)  # until then the page stands still
        elif event == "Runtime.exceptionThrown":
            self.errors.append(json.dumps(about["exceptionDetails"]))
        elif event == "Log.entryAdded" and about["entry"]["level"] == "error":
            self.errors.append(about["entry"]["text"])
        elif event == "Network.requestWillBeSent":
            self.requests.append(about["request"]["url"])
        elif event == "Page.loadEventFired":
            self._loaded = True

    def open(self, address: str) -> float:
        """Load a page, and return the seconds until it was there and drawn once."""
        self._loaded, begun = False, time.monotonic()
        self.call("Page.navigate", url=address)
        deadline = time.monotonic() + TIMEOUT_S
        while not self._loaded:
            self._note(json.loads(self._socket.recv(timeout=max(0.0, deadline - time.monotonic()))))
        self.evaluate("new Promise((done) => requestAnimationFrame(() => setTimeout(done, 0)))")
        return time.monotonic() - begun

    def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression in the page; of a promise, what it becomes."""
        given = {"expression": expression, "returnByValue": True, "awaitPromise": True}
        answer = self.call("Runtime.evaluate", **given)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def text(self, selector: str) -> str:
        return str(self.evaluate(f"document.querySelector({json.dumps(selector)}).textContent"))

    def press(self, *keys: str) -> None:
        """Real key presses, to whatever has the focus."""
        for key in keys:
            about = {"key": key, "windowsVirtualKeyCode": KEY_CODES.get(key, ord(key.upper()[0]))}
            typed = {"text": key} if len(key) == 1 else {}
            self.call("Input.dispatchKeyEvent", type="keyDown", **about, **typed)
            self.call("Input.dispatchKeyEvent", type="keyUp", **about)

    def hover(self, selector: str) -> None:
        """Move the mouse to the middle of an element."""
        box = f"document.querySelector({json.dumps(selector)}).getBoundingClientRect()"
        x, y = self.evaluate(f"[{box}.x + {box}.width / 2, {box}.y + {box}.height / 2]")
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def prefer(self, scheme: str) -> None:
        """`light` or `dark`."""
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.call("Emulation.setEmulatedMedia", features=features)

    def picture(self, path: Path) -> Path:
        """Of what is seen now, as PNG."""
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"]))
        return path

    def memory_mb(self) -> float:
        """Of the process that renders the page, what it holds alone."""
        parts = psutil.Process(self._process.pid).children(recursive=True)
        return max(one.memory_full_info().uss for one in parts if "--type=renderer" in one.cmdline()) / 1e6
