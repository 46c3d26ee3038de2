"""Headless Chromium through its DevTools protocol, over a pipe: no package is needed."""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from typing import Any, Self

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
_SECONDS = 60.0
_EXECUTE = """
import fcntl, os, sys
read, write = (fcntl.fcntl(int(one), fcntl.F_DUPFD, 10) for one in sys.argv[1:3])
os.dup2(read, 3), os.dup2(write, 4)
os.execv(sys.argv[3], sys.argv[3:])
"""
"""Starts a command that reads from descriptor 3 and writes to 4, as the browser does."""


class Browser:
    """A page in a browser of its own. Messages are JSON, ended by a zero byte (`--remote-debugging-pipe`)."""

    def __init__(self, width: int = 1100, height: int = 900, dark: bool = False) -> None:
        self._look = width, height, dark
        self._session: str | None = None
        self._calls = 0
        self._read = b""

    def __enter__(self) -> Self:
        assert CHROMIUM is not None
        self._folder = tempfile.TemporaryDirectory(prefix="chromium-", ignore_cleanup_errors=True)
        theirs_in, self._to = os.pipe()
        self._from, theirs_out = os.pipe()
        flags = ["--headless", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe", "--hide-scrollbars"]
        command = [CHROMIUM, *flags, f"--user-data-dir={self._folder.name}", "about:blank"]
        self._process = subprocess.Popen(
            [sys.executable, "-c", _EXECUTE, str(theirs_in), str(theirs_out), *command],
            pass_fds=[theirs_in, theirs_out],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            process_group=0,
        )
        os.close(theirs_in)
        os.close(theirs_out)
        try:
            self._attach()
        except BaseException:
            self._close()
            raise
        return self

    def _attach(self) -> None:
        width, height, dark = self._look
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        self._call("Runtime.enable")
        features = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self._call("Emulation.setEmulatedMedia", features=features)
        self._call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)

    def __exit__(self, *error: object) -> None:
        self._close()

    def _close(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(10)
        os.close(self._to)
        os.close(self._from)
        self._folder.cleanup()

    def open(self, url: str) -> None:
        self._call("Page.navigate", url=url)
        self.wait_for("document.readyState === 'complete'")

    def run(self, expression: str) -> Any:
        """The value of an expression; fails if it throws."""
        result = self._call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in result, result["exceptionDetails"]
        return result["result"].get("value")

    def wait_for(self, condition: str) -> None:
        end = time.monotonic() + _SECONDS
        while not self.run(f"Boolean({condition})"):
            assert time.monotonic() < end, f"{condition} did not come true"
            time.sleep(0.05)

    def screenshot(self) -> bytes:
        """A PNG of what is visible."""
        return base64.b64decode(self._call("Page.captureScreenshot")["data"])

    def _call(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._calls += 1
        message: dict[str, Any] = {"id": self._calls, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._message()
            if answer.get("id") == self._calls:
                assert "error" not in answer, (method, answer["error"])
                result: dict[str, Any] = answer["result"]
                return result

    def _message(self) -> dict[str, Any]:
        end = time.monotonic() + _SECONDS
        while b"\0" not in self._read:
            ready, _, _ = select.select([self._from], [], [], max(0.0, end - time.monotonic()))
            assert ready, "the browser does not answer"
            part = os.read(self._from, 1 << 16)
            assert part, "the browser has ended"
            self._read += part
        first, _, self._read = self._read.partition(b"\0")
        message: dict[str, Any] = json.loads(first)
        return message
