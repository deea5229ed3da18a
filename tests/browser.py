"""A small client of Chromium's DevTools protocol, over a pipe: open a page, click, look at it."""

from __future__ import annotations

import base64
import fcntl
import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium to open the page with")


class Browser:
    """A headless Chromium with one page.

    Attributes:
        said: Errors and warnings that the page wrote to the console, and exceptions of its scripts.
    """

    def __init__(self, send: int, receive: int, downloads: Path):
        self._send, self._receive = send, receive
        self._count, self._unread, self._session = 0, b"", ""
        self._events: list[dict[str, Any]] = []
        self.said: list[str] = []
        self.downloads = downloads
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)[
            "sessionId"
        ]
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")
        self.call(
            "Browser.setDownloadBehavior", behavior="allow", downloadPath=str(downloads),
            eventsEnabled=True,
        )  # fmt: skip

    def call(self, method: str, **parameters: Any) -> Any:
        """Call a method of the protocol and return its result."""
        self._count += 1
        message = {"id": self._count, "method": method, "params": parameters}
        if self._session and not method.startswith(("Browser.", "Target.")):
            message["sessionId"] = self._session
        os.write(self._send, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == self._count:
                assert "error" not in answer, f"{method}: {answer['error']}"
                return answer["result"]

    def wait_for(self, method: str, **wanted: Any) -> dict[str, Any]:
        """Return the first event of this kind whose parameters have the wanted values."""
        while True:
            for place, event in enumerate(self._events):
                if event["method"] == method and wanted.items() <= event["params"].items():
                    return self._events.pop(place)["params"]
            self._next()

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._unread:
            part = os.read(self._receive, 1 << 20)
            assert part, "Chromium has ended"
            self._unread += part
        line, self._unread = self._unread.split(b"\0", 1)
        message = json.loads(line)
        if "method" in message:
            self._events.append(message)
            self._note(message["method"], message["params"])
        return message

    def _note(self, method: str, found: dict[str, Any]) -> None:
        if method == "Runtime.exceptionThrown":
            self.said.append(str(found["exceptionDetails"].get("exception", found)))
        elif method == "Runtime.consoleAPICalled" and found["type"] in ("error", "warning"):
            self.said.append(str(found["args"]))
        elif method == "Log.entryAdded" and found["entry"]["level"] in ("error", "warning"):
            self.said.append(found["entry"]["text"])

    def open(self, path: Path, width: int = 1400, height: int = 1000, dark: bool = False) -> None:
        """Open a file in a window of this size, on a phone's screen if it is narrow."""
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height,
            deviceScaleFactor=1, mobile=width < 500,
        )  # fmt: skip
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.call("Emulation.setEmulatedMedia", features=scheme)
        self._events.clear()
        self.call("Page.navigate", url=path.as_uri())
        self.wait_for("Page.loadEventFired")

    def run(self, code: str) -> Any:
        """Return the value of an expression in the page."""
        found = self.call("Runtime.evaluate", expression=code, returnByValue=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def click(self, selector: str) -> None:
        """Press the mouse on the middle of an element."""
        place = json.dumps(selector)
        box = self.run(
            f"(() => {{ const e = document.querySelector({place}); "
            f"e.scrollIntoView({{block: 'center', inline: 'center'}}); "
            f"const b = e.getBoundingClientRect(); "
            f"return [b.x + b.width / 2, b.y + b.height / 2]; }})()"
        )
        for kind in ("mousePressed", "mouseReleased"):
            self.call(
                "Input.dispatchMouseEvent", type=kind, x=box[0], y=box[1], button="left",
                clickCount=1,
            )  # fmt: skip

    def download(self, selector: str) -> bytes:
        """Click on a link and return the file that the browser stored."""
        self.click(selector)
        began = self.wait_for("Browser.downloadWillBegin")
        self.wait_for("Browser.downloadProgress", guid=began["guid"], state="completed")
        return (self.downloads / began["suggestedFilename"]).read_bytes()

    def screenshot(self, path: Path) -> None:
        """Save the whole page as a PNG."""
        size = self.call("Page.getLayoutMetrics")["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": size["width"], "height": min(size["height"], 8000)}
        found = self.call(
            "Page.captureScreenshot", clip={**clip, "scale": 1}, captureBeyondViewport=True
        )
        path.write_bytes(base64.b64decode(found["data"]))


@contextmanager
def browser(folder: Path) -> Iterator[Browser]:
    """Start Chromium with a profile in the folder, and end it."""
    assert CHROMIUM is not None
    (read, send), (receive, write) = os.pipe(), os.pipe()

    def pipes() -> None:  # Chromium reads from 3 and writes to 4
        ours = [fcntl.fcntl(end, fcntl.F_DUPFD, 10) for end in (read, write)]
        for end, number in zip(ours, (3, 4), strict=True):
            os.dup2(end, number)

    downloads = folder / "downloads"
    downloads.mkdir()
    process = subprocess.Popen(
        [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run",
         "--disable-dev-shm-usage", "--remote-debugging-pipe", f"--user-data-dir={folder}",
         "--hide-scrollbars"],
        preexec_fn=pipes, pass_fds=(3, 4), stderr=subprocess.DEVNULL,
    )  # fmt: skip
    os.close(read)
    os.close(write)
    try:
        yield Browser(send, receive, downloads)
    finally:
        process.kill()
        process.wait()
        os.close(send)
        os.close(receive)
