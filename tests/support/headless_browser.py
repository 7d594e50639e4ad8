"""A headless Chromium, driven over its DevTools protocol."""

from __future__ import annotations

import base64
import json
import shutil
import subprocess
import time
import urllib.request
from contextlib import ExitStack
from pathlib import Path
from typing import Any

CHROMIUM = next(
    (found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))), None
)
PATIENCE_S = 60


class Browser:
    """One page. complaints: errors of its scripts, and violations of its policy."""

    def __init__(self, folder: Path) -> None:
        from websockets.sync.client import connect

        assert CHROMIUM is not None, "no Chromium is on the PATH"
        self.complaints: list[str] = []
        self._number = 0
        command = [CHROMIUM, "--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run"]
        command += ["--disable-dev-shm-usage", "--remote-debugging-port=0", f"--user-data-dir={folder}", "about:blank"]
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        self._exits = ExitStack()
        self._socket = self._exits.enter_context(connect(self._address(folder), max_size=None))
        for domain in ("Runtime", "Log", "Page"):
            self.call(f"{domain}.enable")

    def _address(self, folder: Path) -> str:
        """Return the address of the page, once the browser listens."""
        said, deadline = folder / "DevToolsActivePort", time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
            if said.exists() and len(said.read_text().split()) == 2:
                with urllib.request.urlopen(
                    f"http://127.0.0.1:{said.read_text().split()[0]}/json", timeout=10
                ) as answer:
                    pages = [page for page in json.load(answer) if page["type"] == "page"]
                if pages:
                    return pages[0]["webSocketDebuggerUrl"]
            time.sleep(0.05)
        raise AssertionError("Chromium does not listen")

    def call(self, method: str, **parameters: Any) -> Any:
        """The result of a command."""
        self._number += 1
        self._socket.send(json.dumps({"id": self._number, "method": method, "params": parameters}))
        while True:
            message = json.loads(self._socket.recv(timeout=PATIENCE_S))
            if message.get("method") in ("Runtime.exceptionThrown", "Log.entryAdded"):
                self.complaints.append(json.dumps(message["params"]))
            if message.get("id") == self._number:
                assert "error" not in message, message
                return message["result"]

    def run(self, script: str) -> Any:
        """The value of an expression; a promise is waited for."""
        answer = self.call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def wait(self, condition: str) -> None:
        """Wait until an expression is true."""
        deadline = time.monotonic() + PATIENCE_S
        while not self.run(condition):
            assert time.monotonic() < deadline, f"never true: {condition}; {self.complaints}"
            time.sleep(0.02)

    def go(self, address: str) -> None:
        self.call("Page.navigate", url=address)

    def picture(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot")["data"]))

    def close(self) -> None:
        self._exits.close()
        self._process.terminate()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
