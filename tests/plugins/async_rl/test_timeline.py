"""The record of what an asynchronous run did when."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spurline.errors import RunDirectoryError, RunFailedError
from spurline_async_rl.timeline.records import (
    GroupSpan,
    GroupState,
    Span,
    SpanKind,
    StepRecord,
    Taken,
    Timeline,
    encode_record,
    read_timeline,
    trained_steps,
)

MILLISECONDS = st.integers(0, 10**9).map(lambda number: number / 1000)
COUNTS = st.integers(0, 10**6)


class Clock:
    """Time that passes when it is told to."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def one_step(timeline: Timeline, clock: Clock, step: int) -> None:
    """Two seconds: a group, a wait, training, a publish."""
    draw = 10 * step
    timeline.group_began(draw, step - 1)
    timeline.began("wait")
    clock.now += 0.5
    timeline.group_ended(draw, "buffered", tokens=7, oldest=step - 1, newest=step - 1)
    timeline.ended("wait")
    timeline.taken(step, [draw])
    timeline.began("train")
    clock.now += 1.0
    timeline.ended("train")
    timeline.began("publish")
    clock.now += 0.5
    timeline.ended("publish")
    timeline.write(step)


def test_a_line_holds_what_ended_since_the_line_before(tmp_path: Path) -> None:
    clock = Clock()
    timeline = Timeline(tmp_path / "timeline.jsonl", clock)
    timeline.group_began(3, 0)
    one_step(timeline, clock, 1)
    clock.now += 0.25
    timeline.group_ended(3, "filtered", tokens=5, oldest=0, newest=1, engines=("engine 1",))
    timeline.write(2)
    first, second = read_timeline(tmp_path / "timeline.jsonl")
    assert first == StepRecord(
        1,
        2.0,
        (GroupSpan(10, 0.0, 0.5, 0, "buffered", 7, 0, 0),),
        (Span("wait", 0.0, 0.5), Span("train", 0.5, 1.5), Span("publish", 1.5, 2.0)),
        (Taken(1, 0.5, (10,)),),
    )
    assert second == StepRecord(2, 2.25, (GroupSpan(3, 0.0, 2.25, 0, "filtered", 5, 0, 1, ("engine 1",)),))


def test_a_resume_drops_later_lines_and_goes_on_with_the_clock(tmp_path: Path) -> None:
    path = tmp_path / "timeline.jsonl"
    clock = Clock()
    timeline = Timeline(path, clock)
    for step in (1, 2, 3):
        one_step(timeline, clock, step)
    kept = path.read_bytes().splitlines(keepends=True)[:2]
    with path.open("ab") as file:
        file.write(b'{"step": 4, "unt')
    again = Clock()
    again.now = 50_000.0
    resumed = Timeline(path, again)
    resumed.resume(2)
    assert path.read_bytes().splitlines(keepends=True) == kept
    one_step(resumed, again, 3)
    records = read_timeline(path)
    assert [(record.step, record.until) for record in records] == [(1, 2.0), (2, 4.0), (3, 6.0)]
    assert trained_steps(records) == {10: 1, 20: 2, 30: 3}


def test_a_last_line_cut_by_a_kill_is_left_out_and_any_other_is_named(tmp_path: Path) -> None:
    path = tmp_path / "timeline.jsonl"
    clock = Clock()
    one_step(Timeline(path, clock), clock, 1)
    whole = path.read_bytes()
    # Earlier versions wrote no engines.
    earlier = whole.replace(b",0,0,[]]", b",0,0]")
    assert earlier != whole
    path.write_bytes(earlier + whole + whole[:40])
    assert [record.groups[0].engines for record in read_timeline(path)] == [(), ()]
    path.write_bytes(whole + b'{"step": 2}\n')
    with pytest.raises(RunDirectoryError, match=r"timeline\.jsonl:2: not a line of a timeline .*until"):
        read_timeline(path)
    assert read_timeline(tmp_path / "none.jsonl") == []


def test_two_threads_lose_nothing(tmp_path: Path) -> None:
    timeline = Timeline(tmp_path / "timeline.jsonl")
    begin = threading.Barrier(2)

    def generate(first: int) -> None:
        begin.wait(10)
        for draw in range(first, first + 2000):
            timeline.group_began(draw, 0)
            timeline.group_ended(draw, "buffered", tokens=1, oldest=0, newest=0)

    thread = threading.Thread(target=generate, args=(0,))
    thread.start()
    begin.wait(10)
    for step in range(1, 50):
        timeline.write(step)
    thread.join(30)
    timeline.write(50)
    found = [group.draw for record in read_timeline(tmp_path / "timeline.jsonl") for group in record.groups]
    assert found == list(range(2000))


def test_a_file_that_cannot_be_written_ends_the_run_with_its_name(tmp_path: Path) -> None:
    (tmp_path / "timeline.jsonl").mkdir()
    timeline = Timeline(tmp_path / "timeline.jsonl", Clock())
    with pytest.raises(RunFailedError, match=r"timeline\.jsonl: cannot be written"):
        timeline.write(1)


GROUPS = st.builds(
    GroupSpan, COUNTS, MILLISECONDS, MILLISECONDS, COUNTS, st.sampled_from(get_args(GroupState)), COUNTS, COUNTS, COUNTS
)
RECORDS = st.builds(
    StepRecord,
    COUNTS,
    MILLISECONDS,
    st.lists(GROUPS, max_size=5).map(tuple),
    st.lists(st.builds(Span, st.sampled_from(get_args(SpanKind)), MILLISECONDS, MILLISECONDS), max_size=5).map(tuple),
    st.lists(st.builds(Taken, COUNTS, MILLISECONDS, st.lists(COUNTS).map(tuple)), max_size=3).map(tuple),
)


@given(RECORDS)
def test_what_is_written_is_what_is_read(tmp_path_factory: pytest.TempPathFactory, record: StepRecord) -> None:
    line = encode_record(record)
    assert line.count(b"\n") == 1
    path = tmp_path_factory.mktemp("run") / "timeline.jsonl"
    path.write_bytes(line)
    assert read_timeline(path) == [record]
