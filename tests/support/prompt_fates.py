"""Prompts whose fate is known beforehand, and what a run has made of them, read from its files alone.

Each row says in its column `fate` what its attempts come to: `trained`; `filtered`, as its rewards are all equal;
`given_up`, as its reward always fails; or `retried`, whose reward fails for a third of the responses, so that other
attempts decide. Nothing here asks the code that is tested.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from run_helpers import read_metrics
from safetensors.numpy import load_file

FATES = ("trained", "trained", "filtered", "trained", "retried", "given_up")

REWARDS = '''
import zlib

def fated(answer):
    """Differs between any two responses, but where the row says otherwise."""
    fate, seen = answer.row["fate"], zlib.crc32(answer.response.encode())
    if fate == "given_up" or (fate == "retried" and seen % 3 == 0):
        raise ConnectionError("the sandbox is gone")
    return 1.0 if fate == "filtered" else seen / 2**32
'''

AGENT = """
import json, os, socket, sys, zlib

session, address = json.loads(sys.stdin.readline()), os.environ["OPENAI_BASE_URL"]
host, _, path = address.removeprefix("http://").partition("/")
asked = json.dumps({"model": session["model"], "messages": session["messages"]}).encode()
head = f"POST /{path}/chat/completions HTTP/1.0\\r\\nHost: {host}\\r\\nContent-Type: application/json\\r\\n"
head += f"Authorization: Bearer {os.environ['OPENAI_API_KEY']}\\r\\nContent-Length: {len(asked)}\\r\\n\\r\\n"
with socket.create_connection((host.split(":")[0], int(host.split(":")[1]))) as link, link.makefile("rb") as answer:
    link.sendall(head.encode() + asked)
    body = answer.read().partition(b"\\r\\n\\r\\n")[2]
seen, fate = zlib.crc32(json.loads(body)["choices"][0]["message"]["content"].encode()), session["row"]["fate"]
if fate == "given_up" or (fate == "retried" and seen % 3 == 0):
    sys.exit("the sandbox is gone")
print(1.0 if fate == "filtered" else seen / 2**32)
"""
"""The same as a program that asks over HTTP, without imports that take long."""

_FILTERED, _GIVEN_UP = -3, -4
"""In the ledger of a checkpoint; a positive number is the step that has trained on the prompt."""


def write_prompts(path: Path, count: int = 24) -> list[str]:
    """Write the rows; returns their fates."""
    digits = random.Random(0)
    fates = [FATES[number % len(FATES)] for number in range(count)]
    rows = [
        {"messages": [{"role": "user", "content": f"sort {digits.randrange(1000):03}"}], "fate": fate} for fate in fates
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return fates


@dataclass(frozen=True)
class Record:
    """What a run left. trained: by step the draws of its batch, with the row of each and its tokens' versions.
    ledger: the state of each draw, in the newest checkpoint."""

    lines: list[dict[str, Any]]
    trained: dict[int, dict[int, tuple[int, set[int]]]]
    ledger: list[int]


def read_record(run_dir: Path, steps: int) -> Record:
    """Of a run with `record_groups: true`."""
    trained = {step: _recorded(run_dir / "groups" / f"step-{step:06d}") for step in range(1, steps + 1)}
    newest = sorted((run_dir / "checkpoints").glob("step-*"))[-1]
    ledger = load_file(newest / "components" / "source" / "async_rollouts.safetensors")["ledger/states"]
    return Record(read_metrics(run_dir), trained, ledger.tolist())


def assert_each_prompt_ended_once(config: dict[str, Any], fates: list[str]) -> Record:
    """Every step has one line and one batch, and each draw of each epoch has met the fate of its row, once."""
    steps, source = config["steps"], config["source"]
    record = read_record(Path(config["run_dir"]), steps)
    assert [line["step"] for line in record.lines] == list(range(1, steps + 1))
    row_of: dict[int, int] = {}
    step_of: dict[int, int] = {}
    for step, batch in record.trained.items():
        assert len(batch) == source["prompts_per_step"], f"step {step}"
        for draw, (row, versions) in batch.items():
            assert draw not in step_of, f"draw {draw} was trained on at step {step_of[draw]} and at {step}"
            step_of[draw], row_of[draw] = step, row
            ages = {step - 1 - version for version in versions}
            assert min(ages) >= 0, f"step {step}, draw {draw}: {ages}"
            assert max(ages) <= source["max_staleness"], f"step {step}, draw {draw}: {ages}"
    assert step_of == {draw: state for draw, state in enumerate(record.ledger) if state > 0}
    ended = Counter(state for state in record.ledger if state <= 0)
    assert ended.keys() <= {_FILTERED, _GIVEN_UP}, f"under way or left over: {ended}"
    _assert_fates(record.ledger, row_of, fates)
    # What ended after the last batch was taken is in no line.
    filtered = sum(line["groups/filtered"] for line in record.lines)
    given_up = sum(line["groups/quarantined"] for line in record.lines)
    last = max(step_of)
    tail = Counter(record.ledger[last + 1 :])
    assert ended[_FILTERED] - tail[_FILTERED] <= filtered <= ended[_FILTERED]
    assert ended[_GIVEN_UP] - tail[_GIVEN_UP] <= given_up <= ended[_GIVEN_UP]
    return record


def _assert_fates(ledger: list[int], row_of: dict[int, int], fates: list[str]) -> None:
    """An epoch draws each row once, so that those nobody has trained on are the ones whose fate is another."""
    count = len(fates)
    for first in range(0, len(ledger), count):
        states = ledger[first : first + count]
        rows = [row_of[draw] for draw in range(first, first + len(states)) if draw in row_of]
        assert len({*rows}) == len(rows), f"a row was trained on twice in the epoch that begins with draw {first}"
        met = Counter(fates[row] for row in rows)
        assert met.keys() <= {"trained", "retried"}, f"epoch of draw {first}: {met}"
        if len(states) == count:
            left = Counter(fates) - met
            assert states.count(_FILTERED) == left["filtered"]
            assert states.count(_GIVEN_UP) == left["given_up"] + left["retried"]
            assert left["trained"] == 0


def _recorded(path: Path) -> dict[int, tuple[int, set[int]]]:
    """Row and versions of the tokens by draw, of one step."""
    found: dict[int, tuple[int, set[int]]] = {}
    [count] = json.loads(path.with_suffix(".json").read_text(encoding="utf-8"))["parts"]
    for block in range(count):
        part = path.with_suffix(".parts") / "0" / f"{block:05d}"
        state = json.loads(part.with_suffix(".json").read_text(encoding="utf-8"))["state"]
        arrays = load_file(part.with_suffix(".safetensors"))
        fields = {name.rpartition("fields/")[2]: array for name, array in arrays.items()}
        versions, lengths = fields["versions/values"], iter(fields["versions/lengths"].tolist())
        at = 0
        for group in state["groups"]:
            length = sum(next(lengths) for item in group["trajectories"] for _ in range(item["turns"]))
            row = int(group["uid"].rpartition("@")[0].rpartition(":")[2])
            assert group["draw"] not in found, f"{path}: draw {group['draw']} twice"
            found[group["draw"]] = row, {*versions[at : at + length].tolist()}
            at += length
    return found
