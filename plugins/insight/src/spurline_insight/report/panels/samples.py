"""Show answers of the model to held-out prompts, the first and the latest side by side.

The answers are lines of `eval_samples.jsonl`. `prompt`, `response` and `reference` are texts or lists of messages.
`scores` has numbers by name. Answers that are rollouts also have `reward` and `passed`. `evaluation` is the name of the
evaluation, if it has one.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

from spurline.trackers.jsonl import read_json_lines
from spurline_insight.report.markup import Panel, block, caption, table, text
from spurline_insight.report_panel import RunRecord

SAMPLES_FILE = "eval_samples.jsonl"
"""The file with the answers, in the run directory."""

_SHOWN = 8
_MAX_ROWS = 100
_MAX_CHARACTERS = 2000

Answer = Mapping[str, Any]


class SamplesPanel(Panel):
    """Answers at the first and at the latest evaluation, with their scores."""

    title = "Sample answers"
    order = 900

    def render(self, record: RunRecord) -> str | None:
        by_evaluation: dict[str, list[Answer]] = {}
        for answer in read_json_lines(record.run_dir / SAMPLES_FILE):
            by_evaluation.setdefault(str(answer.get("evaluation", "")), []).append(answer)
        parts: list[str] = []
        for name, answers in by_evaluation.items():
            parts += [f"<h3>{text(name)}</h3>"] if name else []
            parts += self._table(_answers_by_step(answers))
        return block(*parts, wide=True) if parts else None

    @staticmethod
    def _table(by_step: Mapping[int, Mapping[tuple[str, int], Answer]]) -> list[str]:
        first, latest = min(by_step), max(by_step)
        shown_steps = [first, latest] if first != latest else [latest]
        headings = ["Prompt", "Reference", *(_heading(step, first, latest) for step in shown_steps)]
        rows = [
            [_shorten(prompt), _shorten(by_step[latest][(prompt, number)].get("reference"))]
            + [_answer(by_step[step].get((prompt, number))) for step in shown_steps]
            for prompt, number in list(by_step[latest])[:_MAX_ROWS]
        ]
        fragments = [caption(_verdict(by_step, shown_steps)), table(headings, rows[:_SHOWN], css="answers")]
        if len(rows) > _SHOWN:
            more = table(headings, rows[_SHOWN:], css="answers")
            fragments.append(f"<details><summary>{len(rows) - _SHOWN} more answers</summary>{more}</details>")
        return fragments


def _answers_by_step(lines: Sequence[Answer]) -> dict[int, dict[tuple[str, int], Answer]]:
    """Map each step to its answers. The key of an answer is its prompt, and its index among the answers to that prompt.

    If a step was evaluated again after a resume, only its later answers are returned.
    """
    by_step: dict[int, dict[tuple[str, int], Answer]] = {}
    for step, answers in groupby(lines, key=lambda line: int(line["step"])):
        by_step[step] = {}
        seen = Counter[str]()
        for answer in answers:
            prompt = _as_text(answer.get("prompt"))
            by_step[step][(prompt, seen[prompt])] = answer
            seen[prompt] += 1
    return by_step


def _heading(step: int, first: int, latest: int) -> str:
    if first == latest:
        return f"Answer at step {step:,}"
    return f"First answer (step {step:,})" if step == first else f"Latest answer (step {step:,})"


def _verdict(by_step: Mapping[int, Mapping[Any, Answer]], steps: Sequence[int]) -> str:
    latest = by_step[steps[-1]].values()
    if not any(answer.get("scores") or "passed" in answer for answer in latest):
        return f"{len(latest)} answers at step {steps[-1]:,}, not scored"
    word = "passed" if any("passed" in answer for answer in latest) else "correct"
    correct = {step: sum(map(_is_correct, by_step[step].values())) for step in steps}
    return "; ".join(f"step {step:,}: {correct[step]} of {len(by_step[step])} {word}" for step in steps).capitalize()


def _is_correct(answer: Answer) -> bool:
    if "passed" in answer:
        return bool(answer["passed"])
    scores = answer.get("scores") or {}
    return bool(scores) and all(float(value) >= 1 for value in scores.values())


def _answer(answer: Answer | None) -> str:
    if answer is None:
        return ""
    return f'{_shorten(answer.get("response"))}<div class="marks">{_marks(answer)}</div>'


def _marks(answer: Answer) -> str:
    chips: list[tuple[str, str]] = []
    if "passed" in answer:
        reward = "" if answer.get("reward") is None else f", reward {float(answer['reward']):.3g}"
        chips.append(("good", f"✓ passed{reward}") if answer["passed"] else ("bad", f"✗ failed{reward}"))
    for name, value in (answer.get("scores") or {}).items():
        label = name.replace("_", " ")
        if "passed" not in answer and float(value) in (0, 1):
            chips.append(("good", f"✓ {label}") if value else ("bad", f"✗ {label}"))
        else:
            chips.append(("term", f"{label} {float(value):.3g}"))
    return "".join(f'<span class="mark {kind}">{text(words)}</span>' for kind, words in chips)


def _shorten(value: Any) -> str:
    whole = _as_text(value)
    cut = whole[:_MAX_CHARACTERS]
    rest = f" … ({len(whole) - len(cut):,} more characters)" if len(whole) > len(cut) else ""
    css = "answer turns" if _is_conversation(value) else "answer"
    return f'<div class="{css}">{text(cut)}{rest}</div>'


def _as_text(value: Any) -> str:
    if value is None or isinstance(value, str):
        return value or ""
    if _is_conversation(value):
        return "\n\n".join(_message(item) for item in value)
    return json.dumps(value, ensure_ascii=False)


def _is_conversation(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(item, dict) and "role" in item for item in value)


def _message(message: Mapping[str, Any]) -> str:
    others = {key: item for key, item in message.items() if key not in ("role", "content") and item}
    lines = (f"{message['role']}:", _as_text(message.get("content")), _as_text(others or None))
    return "\n".join(line for line in lines if line)
