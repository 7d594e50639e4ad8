"""Pages as a person sees them in a browser: reports from the disk without a network, and `spurline view`."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import compared_runs
import pytest
from rl_run_record import RL_SUMMARY, rl_metrics
from viewed_runs import add_step, write_rollouts, write_run

from spurline.plugins.host import PluginHost
from spurline.run.directory import RunDirectory
from spurline_insight.report.comparison import write_comparison
from spurline_insight.report.page import default_panels, write_report
from spurline_insight.report_panel import RunRecord

pytest.importorskip("uvicorn", reason="needs the extra spurline-insight[view]")


pytestmark = pytest.mark.processes

CHROMIUM = next(
    (found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))), None
)
PATIENCE_S = 60
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is on the PATH")


class Browser:
    """One page. complaints: errors of its scripts, and violations of its policy."""

    def __init__(self, folder: Path) -> None:
        connect = pytest.importorskip("websockets.sync.client", reason="drives the browser").connect
        assert CHROMIUM is not None
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
        """Return the result of a command."""
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
        """Return the value of an expression. Waits for a promise."""
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

    def close(self) -> None:
        self._exits.close()
        self._process.terminate()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """A browser without a network."""
    with closing(Browser(tmp_path_factory.mktemp("profile"))) as page:
        page.call("Network.enable")
        page.call("Network.emulateNetworkConditions", offline=True, latency=0, downloadThroughput=0, uploadThroughput=0)
        yield page


def opened(browser: Browser, page: Path) -> None:
    """Show a report, and wait until all that is to be seen is drawn."""
    browser.go(page.as_uri())
    browser.wait(f"location.href === {page.as_uri()!r} && document.documentElement?.dataset.drawn === 'yes'")
    seen = "[...document.querySelectorAll('.plot')].filter(plot => !plot.closest('details:not([open])'))"
    browser.wait(f"{seen}.every(plot => plot.querySelector('svg.main-svg .trace path'))")
    assert browser.run("performance.getEntriesByType('resource').length") == 0
    assert browser.complaints == []


@needs_chromium
def test_the_plots_of_a_run_are_drawn_from_the_file_alone(browser: Browser, tmp_path: Path) -> None:
    registry = PluginHost.load([]).registry
    panels = default_panels(registry)
    record = RunRecord(tmp_path, [rl_metrics(step) for step in range(1, 30)], {}, RL_SUMMARY)
    page = write_report(record, panels, tmp_path / "report.html")
    opened(browser, page)
    assert browser.run("document.querySelectorAll('.plot svg.main-svg').length") >= 10


@needs_chromium
def test_a_comparison_draws_a_curve_for_each_run_and_folded_ones_when_they_are_opened(
    browser: Browser, tmp_path: Path
) -> None:
    runs = [
        compared_runs.write_run(tmp_path / "slow", 12, lr=1e-4),
        compared_runs.write_run(tmp_path / "fast", 20, lr=1e-3),
    ]
    page = write_comparison(runs, tmp_path / "comparison.html")
    opened(browser, page)
    of_loss = "[...document.querySelectorAll('.panel')].find(panel => panel.querySelector('h2').textContent === 'loss')"
    strokes = f"[...{of_loss}.querySelectorAll('path.js-line')].map(path => getComputedStyle(path).stroke)"
    assert browser.run(f"new Set({strokes}).size") == 2
    folded = "document.querySelector('.panel details')"
    assert browser.run(f"{folded}.querySelectorAll('svg.main-svg').length") == 0
    browser.run(f"{folded}.open = true")
    browser.wait(f"[...{folded}.querySelectorAll('.plot')].every(plot => plot.querySelector('path.js-line'))")
    browser.call("Emulation.setDeviceMetricsOverride", width=390, height=844, deviceScaleFactor=1, mobile=True)
    try:
        browser.wait("document.documentElement.scrollWidth <= 390")
    finally:
        browser.call("Emulation.clearDeviceMetricsOverride")
    assert browser.complaints == []


@needs_chromium
def test_names_of_runs_and_metrics_stand_in_plots_as_they_are(browser: Browser, tmp_path: Path) -> None:
    names = ["<b>bold< b>", "--series-2", "a &lt; b & $x^2$ %{y}"]
    metric = "eval/<i>set</i> &amp; more"
    runs = [
        compared_runs.write_run(tmp_path / name, 12, lr=number + 1, more={metric: 1.0})
        for number, name in enumerate(names)
    ]
    opened(browser, write_comparison(runs, tmp_path / "comparison.html"))
    plots = "[...document.querySelectorAll('.plot:has(svg)')]"
    texts = f"{plots}.map(plot => [...plot.querySelectorAll({{0!r}})].map(e => e.textContent))"
    assert browser.run(texts.format(".legendtext")) == [names] * browser.run(f"{plots}.length")
    assert [metric] in browser.run(texts.format(".ytitle"))
    pointed = "document.querySelector('.plot')"
    browser.run(f"Plotly.Fx.hover({pointed}, {{xval: 4}}, 'xy')")
    hovers = f"[...{pointed}.querySelectorAll('.hoverlayer .legendtext')].map(e => e.textContent.split(' : ')[0])"
    browser.wait(f"{hovers}.length")
    assert browser.run(hovers) == names
    assert browser.complaints == []


@contextmanager
def viewing(*folders: Path) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """The command over these runs: the address that it prints, and its process."""
    command = [sys.executable, "-m", "spurline.cli", "view", *map(str, folders), "--no-open"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        yield process.stdout.readline().strip(), process
    finally:
        process.kill()
        process.communicate()


def test_it_prints_its_address_and_ends_at_ctrl_c(tmp_path: Path) -> None:
    with viewing(write_run(tmp_path / "run")) as (address, process):
        assert address.startswith("http://127.0.0.1:")
        with pytest.raises(urllib.error.HTTPError, match="403"):
            urllib.request.urlopen(address.partition("?")[0], timeout=30)
        # Not `communicate`, which does not see what has been read together with the first line.
        assert process.stdout is not None
        assert "Press Ctrl-C to stop" in process.stdout.readline()
        process.send_signal(signal.SIGINT)
        _, complained = process.communicate(timeout=30)
    assert process.returncode == 0
    assert complained == ""


@needs_chromium
def test_a_reader_filters_opens_an_attempt_finds_an_old_token_and_compares(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / "first"), write_run(tmp_path / "second", steps=2, loss=3.0)]
    with viewing(*runs) as (address, _), closing(Browser(tmp_path / "profile")) as page:
        page.go(address)
        page.wait("document.querySelectorAll('#charts figure').length >= 3")
        assert page.run("location.href").rstrip("/").endswith(address.partition("/?")[0].rpartition("//")[2])
        assert page.run("document.querySelectorAll('#charts figure:first-child path.line').length") == 2
        width = page.run("document.querySelector('#charts svg').viewBox.baseVal.width")
        page.call("Emulation.setDeviceMetricsOverride", width=390, height=800, deviceScaleFactor=1, mobile=False)
        page.wait(f"document.querySelector('#charts svg').viewBox.baseVal.width < Math.min(390, {width})")
        page.call("Emulation.clearDeviceMetricsOverride")
        page.run("document.querySelector('#metrics input').click()")
        page.wait("location.hash.includes('m=')")

        page.run("location.hash = 'evaluation'")
        page.wait("document.querySelectorAll('#evaluation table').length === 4")

        page.run("location.hash = 'rollouts'")
        page.wait("document.querySelectorAll('#list tbody tr').length === 12")
        prompts = page.run("[...document.querySelectorAll('#list td:nth-child(2)')].map(e => e.textContent)")
        assert all(prompt.startswith(("Sort ", "Write ")) for prompt in prompts)
        page.run(
            "const reward = document.querySelector('[name=max_reward]'); reward.value = '0.3';"
            "document.querySelector('[name=min_reward]').value = '0.2';"
            "reward.dispatchEvent(new Event('input', {bubbles: true}))"
        )
        page.wait("document.querySelectorAll('#list tbody tr').length === 3")
        assert "min_reward=0.2" in page.run("location.hash")
        assert page.run("document.querySelector('#list .marked').textContent") == "2"

        page.run("document.querySelector('#list a').click()")
        page.wait("document.querySelectorAll('#turns .response span').length > 50")
        shown = page.run("document.querySelector('#turns .response').textContent")
        assert shown.startswith("<img src=x onerror=window.hacked=1>\\x1b[31m")
        assert "\\u202e" in shown
        assert page.run("document.querySelectorAll('#turns img, #list img').length") == 0
        assert page.run("window.hacked === undefined")
        page.run("document.querySelector('#next-over').click()")
        page.wait("document.querySelector('#token').textContent.startsWith('token 1 of')")
        page.run("document.querySelector('#next-over').click()")
        page.wait("document.querySelector('#token').textContent.startsWith('token 2 of')")
        assert "age 2, not trained on" in page.run("document.querySelector('#token').textContent")
        assert page.run("document.querySelector('#over').textContent") == "4 tokens over the limit"
        page.run(
            "const kind = document.querySelector('#colour'); kind.value = 'ages';"
            "kind.dispatchEvent(new Event('change'))"
        )
        assert page.run("document.querySelectorAll('#turns .h2').length") == 4

        page.wait("document.querySelector('#siblings a[href^=\"#diff\"]') !== null")
        page.run("document.querySelector('#siblings a[href^=\"#diff\"]').click()")
        page.wait("document.querySelectorAll('#diff .tokens del').length > 0")

        page.run("location.hash = 'rollouts?run=0&prompt=sort&min_step=4'")
        page.wait("document.querySelector('#found').textContent.startsWith('0 attempts')")
        add_step(runs[0], 1000)
        page.wait("document.querySelectorAll('#list tbody tr').length === 2")
        assert page.run("document.querySelector('#given-up').hidden")
        write_rollouts(runs[0], 5, {"Sort 2 1": [("1 2", 1.0, 0)]}, {"rows:7@5": "<b>the judge is gone</b>"})
        page.run("location.hash = 'rollouts?run=0&min_step=5'")
        page.wait("document.querySelector('#given-up tbody').textContent.includes('<b>the judge is gone</b>')")

        # A run in progress, of which another process, this one, has the lock and writes while the page reads.
        (runs[1] / "summary.json").write_text('{"status": "running", "total_steps": 9}')
        directory = RunDirectory(runs[1])
        directory.open()
        with closing(directory):
            page.run("location.hash = 'curves?m=loss'")
            page.wait("document.querySelector('#runs').textContent.includes('running, 2 of 9 steps')")
            for step in (3, 4):
                add_step(runs[1], step)
            page.wait("document.querySelector('#runs').textContent.includes('running, 4 of 9 steps')")
            page.wait("document.querySelector('#charts .readout').textContent.includes('second 0.25')")
        page.run("location.hash = 'rollouts?run=1&min_step=3'")
        page.wait("document.querySelectorAll('#list tbody tr').length === 8")

        unnamed = (
            "[...document.querySelectorAll('input, select, button')].filter(e => !e.labels?.length && !e.textContent)"
        )
        assert page.run(f"{unnamed}.length") == 0
        page.call("Emulation.setDeviceMetricsOverride", width=390, height=844, deviceScaleFactor=1, mobile=True)
        for view in ("curves", "evaluation", "rollouts"):
            page.run(f"location.hash = '{view}'")
            page.wait(f"!document.getElementById('{view}').hidden")
            assert page.run("document.documentElement.scrollWidth") <= 390
            assert page.run("scrollY") == 0
            if view == "curves":
                beyond = "[...document.querySelectorAll('.tick')].filter(e => e.getBoundingClientRect().right > "
                page.wait("[...document.querySelectorAll('.tick')].some(e => e.textContent === '1,000')")
                # They are drawn anew a moment after the page has another width.
                page.wait(f"!{beyond}e.ownerSVGElement.getBoundingClientRect().right).length")
        assert page.complaints == []
