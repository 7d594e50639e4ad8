"""Kept rollouts: what is written is read back, whatever a kill leaves."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
from numpy.typing import NDArray
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from spurline.errors import RunDirectoryError, RunFailedError
from spurline_rl.group_runner import GivenUpPrompt, tags_of
from spurline_rl.kept_rollouts import ROLLOUTS_FOLDER, KeptRollouts, KeptTurn
from spurline_rl.kept_rollouts.keeper import RolloutKeeper, write_step
from spurline_rl.kept_rollouts.table import KeptStep, TokenTexts
from spurline_rl.trajectory import Group, Trajectory, Turn, turns_of, with_turns

MB = 1_000_000


@pytest.fixture(scope="module")
def tokenizer(spurline_tiny_model: Path) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(spurline_tiny_model)


def make_turn(rng: np.random.Generator, prompt: Sequence[int], length: int, step: int) -> Turn:
    rewards = np.zeros(length, np.float32)
    rewards[-1] = rng.integers(2)
    return Turn(
        np.array(prompt, np.int32),
        rng.integers(3, 250, length).astype(np.int32),
        np.r_[np.ones(length - 1), 0].astype(np.uint8),
        logprobs=-rng.exponential(1.0, length).astype(np.float32),
        versions=np.r_[np.full(1, max(0, step - 2)), np.full(length - 1, step - 1)].astype(np.int32),
        rewards=rewards,
        finish_reason="length",
        engines=("engine 0", "engine 1"),
    )


def make_group(rng: np.random.Generator, draw: int, step: int, *, samples: int = 2, turns: int = 1) -> Group:
    """Attempts of 4 to 8 tokens a turn, each turn going on from the one before."""
    prompt = rng.integers(3, 250, 5).tolist()
    attempts: list[Trajectory] = []
    for sample in range(samples):
        made: list[Turn] = []
        context = prompt
        for _ in range(turns):
            made.append(make_turn(rng, context, int(rng.integers(4, 9)), step))
            context = [*context, *made[-1].response_ids.tolist(), 7, 8]
        info = {"response": "\ud800 <b>", "of": {1: {2}}}
        right = float(sum(turn.rewards.sum() for turn in made if turn.rewards is not None))
        attempts.append(Trajectory(f"rows:{draw}@{draw}", sample, tuple(made), {"right": right}, info, retries=sample))
    return Group(f"rows:{draw}@{draw}", draw, tuple(attempts), {"level": 2.0}, {"answer": "4"})


def by_token(turn: Turn) -> NDArray[np.float32]:
    """An advantage for each token that tells the turns apart."""
    return (turn.response_ids % 64 + 1).astype(np.float32)


def make_step(step: int, *, prompts: int = 3, turns: int = 1, per_token: bool = False, filtered: int = 0) -> KeptStep:
    rng = np.random.default_rng(step)
    first = (step - 1) * (prompts + filtered)
    groups = [make_group(rng, first + place, step, turns=turns) for place in range(prompts + filtered)]
    trained = groups[:prompts]
    values = {
        "old_logprobs": [turn.logprobs + 0.001 for turn in turns_of(trained) if turn.logprobs is not None],
        "advantages": [
            by_token(turn) if per_token else np.full(len(turn.response_ids), 0.3, np.float32)
            for turn in turns_of(trained)
        ],
    }
    lost = [GivenUpPrompt("rows:99@99", 99, "row 99: the judge is gone", "math")] if step == 2 else []
    return KeptStep(step, trained, groups[prompts:], lost, 4, lambda name: np.concatenate(values[name]))


def write(folder: Path, tokenizer: PreTrainedTokenizerBase, steps: Sequence[KeptStep], most: int = 10 * MB) -> None:
    keeper = RolloutKeeper(folder, tokenizer, most)
    keeper.start(steps[0].step - 1)
    for step in steps:
        keeper.keep(step)
    keeper.flush()
    keeper.close()


def same_turn(kept: KeptTurn, turn: Turn, step: int) -> None:
    assert turn.logprobs is not None
    assert turn.versions is not None
    assert kept.prompt_ids.tolist() == turn.prompt_ids.tolist()
    assert kept.response_ids.tolist() == turn.response_ids.tolist()
    assert kept.loss_mask.tolist() == turn.loss_mask.tolist()
    assert kept.finish_reason == turn.finish_reason
    assert kept.logprobs is not None
    assert kept.versions is not None
    assert kept.ages is not None
    assert kept.logprobs.tolist() == turn.logprobs.tolist()
    assert kept.versions.tolist() == turn.versions.tolist()
    assert kept.ages.tolist() == (step - 1 - turn.versions).tolist()


def test_prompts_whose_tokens_the_last_update_wrote_come_back_whole(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    made = make_step(2, turns=3, filtered=1)

    info = {"of": np.float64(1.5), "metrics": {"solved": np.bool_(True)}}

    def fresh(group: Group, info: dict[str, Any] = info) -> Group:
        turns = [replace(turn, versions=np.ones_like(turn.versions), engines=()) for turn in turns_of([group])]
        [group] = with_turns([group], turns)
        attempts = (replace(attempt, counts=bool(attempt.sample), info=info) for attempt in group.trajectories)
        return replace(group, trajectories=tuple(attempts))

    # The first group keeps a token of an older update. The second one has a value that JSON cannot hold.
    groups = [made.groups[0], fresh(made.groups[1], {"of": float("nan")}), *map(fresh, made.groups[2:])]
    step = replace(made, groups=groups, filtered=[fresh(group) for group in made.filtered])
    write(tmp_path, tokenizer, [step])
    found = KeptRollouts(tmp_path).outcomes(2)
    assert [found.pop(lost.uid) for lost in step.lost] == step.lost
    whole = [*step.groups[2:], *step.filtered]
    assert {*found} == {group.uid for group in whole}
    for group in whole:
        back = found[group.uid]
        assert not isinstance(back, GivenUpPrompt)
        for one, other in zip(back, group.trajectories, strict=True):
            assert replace(one, turns=()) == replace(other, turns=())
            for turn, wanted in zip(one.turns, other.turns, strict=True):
                values = ("prompt_ids", "response_ids", "loss_mask", "logprobs", "versions", "rewards")
                for name in values:
                    np.testing.assert_array_equal(getattr(turn, name), getattr(wanted, name), name)
                assert turn.finish_reason == wanted.finish_reason


@pytest.mark.parametrize("turns", [1, 3])
@pytest.mark.parametrize("per_token", [False, True])
def test_attempts_come_back_as_they_were_trained(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase, turns: int, per_token: bool
) -> None:
    steps = [make_step(step, turns=turns, per_token=per_token, filtered=step - 1) for step in (1, 2)]
    write(tmp_path, tokenizer, steps)
    rollouts = KeptRollouts(tmp_path)
    assert list(rollouts.steps) == [1, 2]
    for step in steps:
        attempts = list(rollouts.attempts([step.step]))
        groups = [*step.groups, *step.filtered]
        expected = [(group, attempt) for group in groups for attempt in group.trajectories]
        assert len(attempts) == len(expected)
        for kept, (group, attempt) in zip(attempts, expected, strict=True):
            trained = group in step.groups
            assert (kept.uid, kept.draw, kept.epoch, kept.sample) == (
                group.uid,
                group.draw,
                group.draw // 4,
                attempt.sample,
            )
            assert kept.status == ("trained" if trained else "filtered")
            assert (kept.rewards, kept.retries) == (attempt.rewards, attempt.retries)
            assert kept.reward == group.returns[attempt.sample]
            assert (kept.columns, kept.tags) == ({"level": 2.0}, {"answer": "4"})
            assert kept.engines == ["engine 0", "engine 1"]
            assert kept.info["response"] == "\ud800 <b>"
            assert kept.advantage == (None if per_token or not trained else pytest.approx(0.3))
            for kept_turn, turn in zip(kept.turns, attempt.turns, strict=True):
                same_turn(kept_turn, turn, step.step)
                if trained:
                    assert kept_turn.gap is not None
                    assert kept_turn.advantages is not None
                    # A float16 of either logprob would be off by as much as this gap.
                    np.testing.assert_allclose(kept_turn.gap, 0.001, rtol=0.01)
                    wanted = by_token(turn) if per_token else 0.3
                    np.testing.assert_allclose(kept_turn.advantages, wanted, rtol=1e-3)
                else:
                    assert kept_turn.gap is None
                    assert kept_turn.advantages is None
    assert [(prompt.step, prompt.uid, prompt.reason, prompt.info) for prompt in rollouts.given_up()] == [
        (2, "rows:99@99", "row 99: the judge is gone", {"environment": "math"})
    ]


def test_texts_are_those_of_the_tokens_without_a_tokenizer(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    ids = tokenizer.encode("Grüße 😀<|im_end|>")
    step = make_step(1, prompts=1)
    [group] = step.groups
    first, second = group.trajectories
    turn = replace(
        first.turns[0],
        response_ids=np.array(ids, np.int32),
        **{
            name: np.zeros(len(ids), getattr(first.turns[0], name).dtype)
            for name in ("loss_mask", "logprobs", "versions", "rewards")
        },
    )
    group = replace(group, trajectories=(replace(first, turns=(turn,)), second))
    column = np.zeros(sum(len(item.response_ids) for item in turns_of([group])), np.float32)
    write(tmp_path, tokenizer, [replace(step, groups=[group], column=lambda _: column)])
    kept = next(KeptRollouts(tmp_path).attempts()).turns[0]
    assert kept.response_text == "Grüße 😀<|im_end|>"
    assert kept.response_pieces[-1] == "<|im_end|>"
    assert "".join(kept.response_pieces).count("😀") == 1
    assert ids[-1] in kept.special_ids
    assert ids[0] not in kept.special_ids


def test_any_program_that_reads_parquet_reads_texts_and_numbers(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    steps = [make_step(step, turns=2) for step in (1, 2)]
    write(tmp_path, tokenizer, steps)
    table = pyarrow.parquet.read_table(tmp_path / ROLLOUTS_FOLDER)
    assert table["status"].to_pylist() == ["trained"] * 12 + ["given_up"]
    kept = list(KeptRollouts(tmp_path).attempts())
    for row, attempt in zip(table.to_pylist(), kept, strict=False):
        assert row["reward"] == attempt.reward
        assert row["prompt"] == attempt.turns[0].prompt_text
        assert row["response"] == "\n".join(turn.response_text for turn in attempt.turns)
        assert row["max_age"] == max(turn.ages.max() for turn in attempt.turns if turn.ages is not None)


def test_what_an_environment_tells_is_json_whatever_it_is(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    step = make_step(1, prompts=1)
    told = [{"score": float("nan"), "plain": 1}, {(1, 2): "tuple"}]
    attempts = [replace(attempt, info=info) for attempt, info in zip(step.groups[0].trajectories, told, strict=True)]
    write(tmp_path, tokenizer, [replace(step, groups=[replace(step.groups[0], trajectories=tuple(attempts))])])
    assert [attempt.info for attempt in KeptRollouts(tmp_path).attempts()] == [
        {"score": "nan", "plain": "1"},
        {"(1, 2)": "tuple"},
    ]


def test_a_kill_while_a_step_is_written_leaves_the_steps_before_it_alone(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, tokenizer, [make_step(1)])

    def killed(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        write_step(tmp_path / ROLLOUTS_FOLDER, 2, pa.table({"step": [2]}))
    assert list(KeptRollouts(tmp_path).steps) == [1]
    assert len(list(KeptRollouts(tmp_path).attempts())) == 6


@pytest.mark.parametrize("keeps", [True, False])
def test_a_resume_removes_the_steps_after_its_checkpoint(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase, keeps: bool
) -> None:
    write(tmp_path, tokenizer, [make_step(step) for step in range(1, 5)])
    RolloutKeeper(tmp_path, tokenizer, MB * keeps).start(2)
    assert list(KeptRollouts(tmp_path).steps) == [1, 2]


def test_a_damaged_file_is_named_and_the_others_are_read(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    write(tmp_path, tokenizer, [make_step(step) for step in range(1, 4)])
    path = tmp_path / ROLLOUTS_FOLDER / "step-000002.parquet"
    content = path.read_bytes()
    rollouts = KeptRollouts(tmp_path)
    for damaged in (b"", content[:-1], content[: len(content) // 2], b"x" * len(content)):
        path.write_bytes(damaged)
        with pytest.raises(RunDirectoryError, match=r"step-000002\.parquet"):
            list(rollouts.attempts([2]))
    assert len(list(rollouts.attempts([1, 3]))) == 12
    path.unlink()
    assert list(rollouts.attempts([2])) == []


def test_a_reader_sees_what_a_run_adds(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    with pytest.raises(RunDirectoryError, match=r"runs/mth"):
        KeptRollouts(tmp_path / "runs" / "mth")
    rollouts = KeptRollouts(tmp_path)
    assert list(rollouts.attempts()) == []
    write(tmp_path, tokenizer, [make_step(1)])
    assert list(rollouts.steps) == [1]


def test_a_long_run_stays_within_its_limit(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    steps = [make_step(step) for step in range(1, 41)]
    write(tmp_path, tokenizer, steps[:1])
    one = _size(tmp_path)
    write(tmp_path, tokenizer, steps[1:], most=12 * one)
    rollouts = KeptRollouts(tmp_path)
    assert _size(tmp_path) <= 12 * one
    assert len(rollouts.steps) > 8
    assert list(rollouts.steps) == list(range(41 - len(rollouts.steps), 41)), "the oldest steps go"
    assert len(list(rollouts.attempts())) == 6 * len(rollouts.steps)
    write(tmp_path, tokenizer, [make_step(41, prompts=30)], most=one)
    assert list(rollouts.steps) == [41], "the newest step stays, even if it is larger than the limit"


def _size(run_dir: Path) -> int:
    return sum(path.stat().st_size for path in (run_dir / ROLLOUTS_FOLDER).iterdir())


def test_a_text_that_attempts_share_is_decoded_once(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoded: list[int] = []
    of = TokenTexts.of
    monkeypatch.setattr(TokenTexts, "of", lambda texts, ids: decoded.append(len(ids)) or of(texts, ids))
    write(tmp_path, tokenizer, [make_step(1, prompts=3)])
    assert decoded == [6, 3], "six responses, three prompts"


def test_an_old_step_that_cannot_be_removed_ends_the_run(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    write(tmp_path, tokenizer, [make_step(1)])
    keeper = RolloutKeeper(tmp_path, tokenizer, 1)
    keeper.start(1)
    path = tmp_path / ROLLOUTS_FOLDER / "step-000001.parquet"
    path.unlink()
    path.mkdir()
    keeper.keep(make_step(2))
    with pytest.raises(RunFailedError, match=r"step-000001\.parquet: cannot be written"):
        keeper.flush()


def test_what_fails_beside_the_training_ends_it(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise RunFailedError("the disk is full")

    monkeypatch.setattr("spurline_rl.kept_rollouts.keeper.write_step", full)
    for ask in ("keep", "flush", "close"):
        keeper = RolloutKeeper(tmp_path, tokenizer, MB)
        keeper.start(0)
        keeper.keep(make_step(1))
        with pytest.raises(RunFailedError, match="the disk is full"):
            keeper.keep(make_step(2)) if ask == "keep" else getattr(keeper, ask)()
        keeper.close()
    keeper = RolloutKeeper(tmp_path, tokenizer, MB)
    keeper.start(0)
    keeper.keep(make_step(1))
    with pytest.raises(KeyError) as ended, closing(keeper):
        raise KeyError("first")
    assert ended.value.__notes__ == ["Writing the rollouts failed too: the disk is full"]


def test_a_disk_that_does_not_answer_ends_the_run(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = threading.Event()
    monkeypatch.setattr("spurline_rl.kept_rollouts.keeper.write_step", lambda *_: answers.wait(60) and 0)
    monkeypatch.setattr("spurline_rl.kept_rollouts.keeper._LIMIT_S", 0.05)
    keeper = RolloutKeeper(tmp_path, tokenizer, MB)
    keeper.start(0)
    keeper.keep(make_step(1))
    [writer] = [thread for thread in threading.enumerate() if thread.name == "spurline-kept-rollouts"]
    with pytest.raises(RunFailedError, match=r"source\.keep_rollouts"):
        keeper.flush()
    keeper.close()
    assert writer.is_alive()
    assert writer.daemon, "the interpreter would wait for it"
    answers.set()
    writer.join(30)


def test_a_removed_folder_is_no_place_to_write(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    keeper = RolloutKeeper(tmp_path, tokenizer, MB)
    keeper.start(0)
    (tmp_path / ROLLOUTS_FOLDER).rmdir()
    keeper.keep(make_step(1))
    with pytest.raises(RunFailedError, match="cannot be written"):
        keeper.flush()
    keeper.close()


def test_a_folder_that_is_a_link_is_not_written_to(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    precious = tmp_path / "elsewhere" / "step-000001.parquet"
    precious.parent.mkdir()
    precious.write_text("years of work")
    (tmp_path / ROLLOUTS_FOLDER).symlink_to(precious.parent)
    with pytest.raises(RunFailedError, match="is a link"):
        RolloutKeeper(tmp_path, tokenizer, MB).start(0)
    assert precious.read_text() == "years of work"


def test_short_values_of_a_row_are_its_tags() -> None:
    row = {"answer": "4", "level": np.int64(3), "hard": True, "prompt": "x" * 500, "messages": [{}], "none": None}
    row |= {"missing": float("nan"), "endless": np.float32("inf"), "long": 10**400}
    assert tags_of(row) == {"answer": "4", "level": 3, "hard": True, "long": 10**400}
