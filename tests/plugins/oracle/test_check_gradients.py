"""The oracle names the mistakes of small training loops in plain torch, and finds nothing in right ones."""

from __future__ import annotations

from pathlib import Path

import pytest
from small_stacks import RIGHT, WRONG

from spurline_oracle.command import report
from spurline_oracle.dump import read_dump
from spurline_oracle.verdict import judge


@pytest.mark.parametrize("name", RIGHT)
def test_a_right_stack_gets_a_clean_bill(name: str, tmp_path: Path) -> None:
    RIGHT[name](tmp_path)
    verdict = judge(read_dump(tmp_path), "cpu")
    assert verdict.is_clean, report(verdict)
    assert verdict.layer == ""


@pytest.mark.parametrize("name", WRONG)
def test_the_mistake_of_a_wrong_stack_is_named(name: str, tmp_path: Path) -> None:
    stack, cause = WRONG[name]
    stack(tmp_path)
    verdict = judge(read_dump(tmp_path), "cpu")
    print(report(verdict))
    for e in (verdict.explanations + verdict.others)[:8]: print(f"{e.departure.total:.2e} {e.departure.excess:.2e} {e.title}")
    assert [each.title for each in verdict.explanations][:1] == [cause], report(verdict)
