"""A real Chromium over its debugging pipe: no port, no network, no further dependency."""

import base64
import contextlib
import fcntl
import io
import itertools
import json
import os
import select
import shutil
import signal
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import pytest
from PIL import Image

FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync", "--remote-debugging-pipe",
)  # fmt: skip
PATIENCE_S = 60.0


class Browser:
    """One tab of a headless Chromium; every page that it loads is a local file."""

    def __init__(self, profile: Path) -> None:
        found = shutil.which("chromium")
        if found is None:
            pytest.fail("chromium is missing; install Debian's: apt-get install chromium")
        ours, theirs = (self._pipe(), self._pipe())
        self._to, self._from = ours[1], theirs[0]
        actions = [(os.POSIX_SPAWN_DUP2, ours[0], 3), (os.POSIX_SPAWN_DUP2, theirs[1], 4),
                   *((os.POSIX_SPAWN_OPEN, n, os.devnull, os.O_RDWR, 0) for n in (1, 2))]  # fmt: skip
        words = [found, *FLAGS, f"--user-data-dir={profile}", "about:blank"]
        self._pid = os.posix_spawn(found, words, dict(os.environ), file_actions=actions, setsid=True)
        os.close(ours[0])
        os.close(theirs[1])
        self._ids = itertools.count(1)
        self._unread = b""
        self.events: list[dict[str, Any]] = []
        self._session: str | None = None

    @staticmethod
    def _pipe() -> tuple[int, int]:
        """A pipe whose ends are clear of the numbers that Chromium wants."""
        read, write = os.pipe()
        ends = (fcntl.fcntl(read, fcntl.F_DUPFD_CLOEXEC, 20), fcntl.fcntl(write, fcntl.F_DUPFD_CLOEXEC, 20))
        os.close(read)
        os.close(write)
        return ends

    def __enter__(self) -> Self:
        target = self("Target.createTarget", url="about:blank")["targetId"]
        self._session = self("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Network", "Runtime", "Log"):
            self(f"{domain}.enable")
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        os.close(self._to)
        os.close(self._from)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._pid, signal.SIGKILL)
        os.waitpid(self._pid, 0)

    def __call__(self, method: str, **params: Any) -> dict[str, Any]:
        """Send one command of the DevTools protocol, and return its result; events on the way are kept."""
        number = next(self._ids)
        message = {"id": number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._read()
            if answer.get("id") == number:
                assert "error" not in answer, answer
                return dict(answer["result"])
            self.events.append(answer)

    def _read(self) -> dict[str, Any]:
        until = time.monotonic() + PATIENCE_S
        while b"\0" not in self._unread:
            ready, _, _ = select.select([self._from], [], [], until - time.monotonic())
            assert ready, f"chromium said nothing for {PATIENCE_S:.0f} s"
            some = os.read(self._from, 1 << 20)
            assert some, "chromium ended"
            self._unread += some
        message, self._unread = self._unread.split(b"\0", 1)
        return dict(json.loads(message))

    def open(self, path: Path, width: int, *, dark: bool = False) -> None:
        """Load a file in a layout that is truly so many CSS pixels wide."""
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self("Emulation.setEmulatedMedia", media="screen", features=[scheme])
        self("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=width < 600)
        self.events.clear()
        self("Page.navigate", url=path.as_uri())
        while not any(e.get("method") == "Page.loadEventFired" for e in self.events):
            self.events.append(self._read())
        assert self.value("innerWidth") == width

    def value(self, expression: str) -> Any:
        """What an expression gives inside the page."""
        return self("Runtime.evaluate", expression=expression, returnByValue=True)["result"].get("value")

    def requested(self) -> list[str]:
        """The address of everything that the page asked for."""
        return [e["params"]["request"]["url"] for e in self.events if e.get("method") == "Network.requestWillBeSent"]

    def picture(self, height: int = 3000) -> Image.Image:
        """The page from its top, so many pixels high at most."""
        width = self.value("innerWidth")
        clip = {"x": 0, "y": 0, "width": width, "height": height, "scale": 1}
        data = self("Page.captureScreenshot", format="png", captureBeyondViewport=True, clip=clip)["data"]
        return Image.open(io.BytesIO(base64.b64decode(data))).convert("RGB")

    def pdf(self) -> bytes:
        """The page as it is printed."""
        return base64.b64decode(self("Page.printToPDF")["data"])
