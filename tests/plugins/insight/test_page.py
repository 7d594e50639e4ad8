"""The page as a file: self-contained, escaped, complete in the face of failing panels."""

from __future__ import annotations

import base64
import gzip
import json
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from plotly.offline import get_plotlyjs
from rl_run_record import rl_metrics

from spurline.errors import RunFailedError
from spurline_insight.report.page import write_report
from spurline_insight.report.record import read_record
from spurline_insight.report_panel import RunRecord

RunDirMaker = Callable[..., Path]
ATTACK = '<script>alert("x")</script>'


def own_html(page: Path) -> str:
    """The page without the plotly.js library."""
    return re.sub(r'(id="plotly">).*?(</script>)', r"\1\2", page.read_text(encoding="utf-8"))


def test_the_page_loads_nothing_from_outside(make_run_dir: RunDirMaker, panels: list[Any]) -> None:
    run_dir = make_run_dir()
    page = write_report(read_record(run_dir), panels, run_dir / "report.html")
    html = own_html(page)
    assert not re.findall(r"""(?:src|href)\s*=\s*["']?[^"'>]*""", html)
    assert not re.findall(r"https?://|@import|url\(", html)
    assert "default-src 'none'" in html
    assert "showSendToCloud: false" in html


def test_the_page_holds_plotly_once_and_every_panel_that_has_something_to_show(
    make_run_dir: RunDirMaker, panels: list[Any]
) -> None:
    samples = [{"step": 10, "prompt": "1+1", "response": "2", "reference": "2", "scores": {"exact_match": 1.0}}]
    run_dir = make_run_dir(samples=samples)
    page = write_report(read_record(run_dir), panels, run_dir / "report.html")
    html = page.read_text(encoding="utf-8")
    packed_plotly = re.findall(r'id="plotly">(.*?)</script>', html)
    assert len(packed_plotly) == 1
    assert gzip.decompress(base64.b64decode(packed_plotly[0])).decode() == get_plotlyjs()
    titles = re.findall(r'<section class="panel"><h2>(.*?)</h2>', html)
    of_rollouts = {"Environments", "Reward", "Groups", "Responses", "Policy", "Mismatch of rollout and trainer"}
    of_other_runs = {"Health", "Preferences", *of_rollouts}
    assert titles == [panel.title for panel in panels if panel.title not in of_other_runs]
    assert len(titles) == 11


def test_the_header_names_run_status_and_what_was_trained(make_run_dir: RunDirMaker) -> None:
    run_dir = make_run_dir()
    html = own_html(write_report(read_record(run_dir), [], run_dir / "report.html"))
    assert "<h1>arith-sft</h1>" in html
    assert '<span class="status finished">Finished</span>' in html
    assert "models/tiny · data/arith.jsonl" in html


def test_an_unfinished_run_shows_how_far_it_came(make_run_dir: RunDirMaker) -> None:
    run_dir = make_run_dir(num_steps=10, summary={"status": "running", "total_steps": 40})
    html = own_html(write_report(read_record(run_dir), [], run_dir / "report.html"))
    assert 'style="width:25.0%"' in html


def test_a_failed_run_shows_why(make_run_dir: RunDirMaker) -> None:
    run_dir = make_run_dir(summary={"status": "failed", "error": "loss is <nan> at step 7"})
    html = own_html(write_report(read_record(run_dir), [], run_dir / "report.html"))
    assert '<span class="status failed">Failed</span>' in html
    assert "loss is &lt;nan&gt; at step 7" in html


def test_half_a_surrogate_pair_in_a_sample_does_not_stop_the_page(make_run_dir: RunDirMaker, panels: list[Any]) -> None:
    run_dir = make_run_dir(samples=[{"step": 1, "prompt": "\ud83d", "response": "", "reference": None, "scores": {}}])
    assert write_report(read_record(run_dir), panels, run_dir / "report.html").exists()


def test_text_from_config_samples_and_summary_is_escaped(make_run_dir: RunDirMaker, panels: list[Any]) -> None:
    run_dir = make_run_dir(
        config={ATTACK: ATTACK, "model": {"path": ATTACK}, "data": {"train": [{"label": ATTACK}]}, "x": [[ATTACK]]},
        summary={
            "status": ATTACK,
            "versions": {ATTACK: ATTACK},
            "data": {ATTACK: {"samples": 3, "dropped": {ATTACK: 1}}},
        },
        samples=[{"step": 1, "prompt": ATTACK, "response": ATTACK, "reference": ATTACK, "scores": {ATTACK: 0.5}}],
    )
    with (run_dir / "metrics.jsonl").open("a") as handle:
        handle.write('{"step": 41, "eval/<script>alert(1)</script>": 0.5, "time/<script>alert(1)</script>": 0.5}\n')
    html = own_html(write_report(read_record(run_dir), panels, run_dir / "report.html"))
    assert "<script>alert" not in html
    assert html.count("&lt;script&gt;alert") > 10
    assert "\\u0026lt;script\\u0026gt;alert(1)" in html


def test_no_finished_step_is_said_and_the_rest_is_still_shown(make_run_dir: RunDirMaker, panels: list[Any]) -> None:
    run_dir = make_run_dir(num_steps=0)
    html = own_html(write_report(read_record(run_dir), panels, run_dir / "report.html"))
    assert "No training step has finished yet" in html
    assert "models/tiny" in html


def test_a_failing_panel_leaves_its_error_on_the_page_and_fails_the_report(make_run_dir: RunDirMaker) -> None:
    class Broken:
        title = "Broken"

        def render(self, record: RunRecord) -> str | None:
            raise KeyError("<reward>")

    class Fine:
        title = "Fine"

        def render(self, record: RunRecord) -> str | None:
            return "<p>still here</p>"

    run_dir = make_run_dir()
    out = run_dir / "report.html"
    with pytest.raises(RunFailedError, match=r"report\.html: written, but .*Broken \(KeyError") as caught:
        write_report(read_record(run_dir), [Broken(), Fine()], out)
    assert isinstance(caught.value.__cause__, KeyError)
    html = own_html(out)
    assert "KeyError: &#x27;&lt;reward&gt;&#x27;" in html
    assert html.index("Broken could not be drawn") < html.index("still here")


def test_a_page_that_cannot_be_written_keeps_the_old_one(make_run_dir: RunDirMaker) -> None:
    run_dir = make_run_dir()
    (run_dir / "report.html").mkdir()
    with pytest.raises(RunFailedError, match=r"report\.html: cannot be written"):
        write_report(read_record(run_dir), [], run_dir / "report.html")
    assert [path.name for path in run_dir.iterdir() if path.name.endswith(".tmp")] == []


def test_the_report_of_a_long_run_takes_less_than_3_mb(make_run_dir: RunDirMaker, panels: list[Any]) -> None:
    noise = random.Random(7)
    run_dir = make_run_dir(num_steps=1)
    line = json.loads((run_dir / "metrics.jsonl").read_text()) | rl_metrics(1)
    with (run_dir / "metrics.jsonl").open("w") as file:
        for step in range(1, 3001):
            noisy = {name: value * noise.uniform(0.5, 1) for name, value in line.items()}
            file.write(json.dumps(noisy | {"step": step, "tokens": 6000}) + "\n")
    page = write_report(read_record(run_dir), panels, run_dir / "report.html")
    assert len(own_html(page)) > 200_000
    assert page.stat().st_size < 3_000_000
