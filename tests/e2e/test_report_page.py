"""Reports as a browser shows them, from the disk and without a network."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from compared_runs import write_run
from headless_browser import CHROMIUM, Browser
from rl_run_record import RL_SUMMARY, rl_metrics

from spurline.plugins.host import PluginHost
from spurline_insight.report.comparison import write_comparison
from spurline_insight.report.page import default_panels, write_report
from spurline_insight.report_panel import RunRecord

pytestmark = [pytest.mark.processes, pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is on the PATH")]
pytest.importorskip("websockets", reason="drives the browser")


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


def test_the_plots_of_a_run_are_drawn_from_the_file_alone(browser: Browser, tmp_path: Path) -> None:
    registry = PluginHost.load([]).registry
    panels = default_panels(registry)
    record = RunRecord(tmp_path, [rl_metrics(step) for step in range(1, 30)], {}, RL_SUMMARY)
    page = write_report(record, panels, tmp_path / "report.html")
    opened(browser, page)
    assert browser.run("document.querySelectorAll('.plot svg.main-svg').length") >= 10


def test_a_comparison_draws_a_curve_for_each_run_and_folded_ones_when_they_are_opened(
    browser: Browser, tmp_path: Path
) -> None:
    runs = [write_run(tmp_path / "slow", 12, lr=1e-4), write_run(tmp_path / "fast", 20, lr=1e-3)]
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


def test_names_of_runs_and_metrics_stand_in_plots_as_they_are(browser: Browser, tmp_path: Path) -> None:
    names = ["<b>bold< b>", "--series-2", "a &lt; b & $x^2$ %{y}"]
    metric = "eval/<i>set</i> &amp; more"
    runs = [write_run(tmp_path / name, 12, lr=number + 1, more={metric: 1.0}) for number, name in enumerate(names)]
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
