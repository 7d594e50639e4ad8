"""A source of one's own, a decorated one, and a column of the data that reaches advantages and the loss."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import run_helpers
import torch
from reward_functions import in_process
from run_helpers import Config, write_rows

from spurline import load_config
from spurline.data.batch import TrainingBatch
from spurline.errors import CheckpointError, ConfigError, DataError
from spurline.plugins import hookimpl
from spurline.plugins.host import InstalledPlugin
from spurline.protocols.loss import Loss
from spurline.protocols.source import BatchSource, DecoratedSource, DecoratedSourceConfig, SourceConfig
from spurline.run.build import build_data
from spurline.testing import PluginContract
from spurline_async_rl.source.recordings import groups_of, groups_state
from spurline_models.losses.cross_entropy import CrossEntropy
from spurline_models.testing import LossContract
from spurline_preference.dpo import Dpo
from spurline_preference.kto import Kto
from spurline_rl.protocols.advantage import Advantage
from spurline_rl.testing import AdvantageContract, make_trajectories
from spurline_rl.trajectory import Group
from spurline_sources_and_columns.config import RowGradientConfig, RowWeightConfig
from spurline_sources_and_columns.row_weight import RowGradient, RowWeight

NAME = "sources_and_columns"
AVAILABLE = {NAME: InstalledPlugin(NAME, f"spurline_{NAME}.plugin", "under-test", "0.1.0")}


class Batches:
    """Keeps a copy of what the update is given in each step."""

    def __init__(self) -> None:
        self.seen: list[TrainingBatch] = []

    @hookimpl(wrapper=True)
    def train_step(self, batch: TrainingBatch) -> Any:
        self.seen.append(batch.take(range(batch.num_rows)))
        return (yield)


@pytest.fixture
def base(base_config: Config, spurline_chat_file: Path) -> Config:
    shared = {name: base_config[name] for name in ("run_dir", "model", "steps", "optimizer", "backend")}
    return {**shared, "plugins": [NAME], "data": {"train": str(spurline_chat_file)}, "schedule": "constant"}


@pytest.fixture
def rollouts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Config:
    module = tmp_path / "modules" / "column_rewards.py"
    module.parent.mkdir()
    module.write_text("def length(answer):\n    return sum(map(ord, answer.response)) % 17 / 17\n", encoding="utf-8")
    monkeypatch.syspath_prepend(str(module.parent))
    return {
        "name": "rollouts",
        "prompts_per_step": 2,
        "samples_per_prompt": 4,
        "environment": {"rewards": in_process("column_rewards:length")},
        "sampling": {"max_new_tokens": 6},
    }


@pytest.fixture
def weighted(tmp_path: Path) -> Callable[..., Path]:
    """Writes chat rows with a weight each."""

    def write(weight: Callable[[int], Any], count: int = 12) -> Path:
        rows = []
        for number in range(count):
            turns = [{"role": "user", "content": f"Say {number}"}, {"role": "assistant", "content": f"{number} it is"}]
            rows.append({"messages": turns, "weight": weight(number)})
        return write_rows(tmp_path / "weighted.jsonl", rows)

    return write


def train(config: Mapping[str, Any], **changes: Any) -> tuple[list[dict[str, Any]], list[TrainingBatch]]:
    """Return the metrics lines without times, and the batches of the steps that this call trained."""
    batches = Batches()
    run = run_helpers.train(config, batches, available=AVAILABLE, **changes)
    return run.without_times, batches.seen


def test_windows_are_the_texts_as_one_stream_and_every_window_is_full(base: Config, tmp_path: Path) -> None:
    data = write_rows(tmp_path / "texts.jsonl", [{"text": text} for text in ("abcdefghij" * 5, "klm", "nopqrst" * 9)])
    source = {"name": "windows", "window_tokens": 8}
    config = {**base, "data": {"train": str(data)}, "source": source, "batch_size": 3, "steps": 2}
    metrics, batches = train(config, collator={"name": "padded"})
    assert [line["step"] for line in metrics] == [1, 2]
    first = batches[0].tokens["input_ids"]
    second = batches[1].tokens["input_ids"]
    assert tuple(first.shape) == (3, 8)
    from transformers import AutoTokenizer

    text = AutoTokenizer.from_pretrained(base["model"]["path"]).decode(torch.cat([first, second]).flatten())
    assert text.startswith(("abcdefghij" * 5)[:40])
    assert batches[0].num_loss_tokens == 3 * 7


def test_a_source_of_ones_own_resumes_exactly_and_refuses_other_data(base: Config, tmp_path: Path) -> None:
    data = write_rows(tmp_path / "texts.jsonl", [{"text": "some words go here " * 30}])
    config = {**base, "data": {"train": str(data)}, "source": {"name": "windows", "window_tokens": 8}, "batch_size": 4}
    whole, _ = train(config, name="whole")
    train(config, steps=3)
    pieces, _ = train(config)
    assert pieces == whole
    write_rows(data, [{"text": "other words go here " * 30}])
    with pytest.raises(CheckpointError, match="windows differ from the windows of the checkpoint"):
        train(config, steps=8)


def test_a_source_of_ones_own_says_which_row_has_no_text(base: Config) -> None:
    with pytest.raises(DataError, match=r"has no text in the column 'text'.*source\.column.*messages"):
        train(base, source="windows")


def test_a_decorated_sft_source_changes_the_batches_it_is_for_and_no_others(base: Config) -> None:
    config = {**base, "batch_size": 8, "steps": 4, "collator": {"name": "packed", "max_tokens": 256}}
    config["data"]["max_length"] = 128
    _, plain = train(config, name="plain")
    _, batches = train(config, source={"name": "short_first", "first_tokens": 3, "until_step": 2, "of": "sft"})
    for step, (before, after) in enumerate(zip(plain, batches, strict=True), start=1):
        assert torch.equal(before.tokens["input_ids"], after.tokens["input_ids"])
        if step > 2:
            assert torch.equal(before.tokens["loss_weights"], after.tokens["loss_weights"])
            continue
        expected = torch.zeros_like(before.tokens["loss_weights"])
        for row in range(before.num_rows):
            for segment in range(1, len(before.segments["uid"][row]) + 1):
                here = before.tokens["segment_ids"][row] == segment
                (trained,) = torch.nonzero(here & (before.tokens["loss_weights"][row] > 0), as_tuple=True)
                expected[row, trained[:3]] = 1.0
        assert before.num_rows < 8, "the case must pack several samples into a row to tell anything"
        assert torch.equal(after.tokens["loss_weights"], expected)
        assert after.num_loss_tokens < before.num_loss_tokens


def test_a_decorated_source_of_rollouts_takes_its_defaults_and_its_state_along(
    base: Config, rollouts: Config, tmp_path: Path
) -> None:
    source = {"name": "short_first", "first_tokens": 2, "until_step": 3, "of": rollouts}
    loaded = load_config({**base, "source": source}, available=AVAILABLE).config
    assert (loaded.loss.name, loaded.collator.name, loaded.minibatches.name) == ("ppo", "rollouts", "by_prompt")
    assert (loaded.source.facts.num_prompts, loaded.source.facts.supplies) == (2, "rollouts")
    whole, batches = train(base, source=source, name="whole")
    assert batches[0].num_loss_tokens <= 2 * 2 * 4 < batches[3].num_loss_tokens
    train(base, source=source, steps=2)
    pieces, _ = train(base, source=source)
    assert pieces == whole
    assert all("reward/mean" in line for line in whole)


def test_a_decorated_source_of_rollouts_makes_the_attempts_of_evaluations(base: Config, rollouts: Config) -> None:
    source = {"name": "short_first", "first_tokens": 2, "until_step": 3, "of": rollouts}
    few = {"name": "rollouts", "data": base["data"]["train"], "max_prompts": 2}
    lines, _ = train(base, source=source, evaluations={"few": few}, steps=2)
    assert "eval/few/pass@1" in lines[-1]
    with pytest.raises(ConfigError, match="which needs attempts at prompts, but the source 'short_first' makes none"):
        train(base, source={**source, "of": "sft"}, evaluations={"few": few})


def test_a_decorator_has_the_facts_of_the_inner_source_which_alone_refuses_dropout(
    base: Config, rollouts: Config
) -> None:
    source = {"name": "short_first", "first_tokens": 2, "until_step": 3, "of": {**rollouts, "carry": ["weight"]}}
    decorated = load_config({**base, "source": source}, available=AVAILABLE).config.source
    assert isinstance(decorated, DecoratedSourceConfig)
    inner = decorated.of.facts
    assert inner.compares_logprobs
    assert decorated.facts == replace(inner, compares_logprobs=False)
    base["model"]["config_overrides"] = {"attention_dropout": 0.1}
    with pytest.raises(ConfigError) as refused:
        load_config({**base, "source": source}, available=AVAILABLE)
    assert str(refused.value).count("which compares logprobs") == 1


@pytest.mark.parametrize(
    ("outer", "inner", "run", "place"),
    [
        ({"samples_per_prompt": 3}, {}, {}, "source.of.samples_per_prompt"),
        ({}, {"first_tokens": 3}, {}, "source.first_tokens"),
        ({}, {}, {"advantage": "grpo"}, "source.of.advantage"),
        ({}, {}, {"loss": "grpo"}, "source.of.advantage: grpo"),
        ({"rewards": "exact_match"}, {}, {}, "source.of.environment.rewards"),
    ],
)
def test_a_setting_at_the_wrong_place_of_a_decorated_source_is_told_the_right_one(
    base: Config, rollouts: Config, outer: Config, inner: Config, run: Config, place: str
) -> None:
    source = {"name": "short_first", "first_tokens": 2, "until_step": 1, "of": rollouts | inner} | outer
    with pytest.raises(ConfigError, match=rf"(It exists as|: set) {place}\b"):
        load_config(base | {"source": source} | run, available=AVAILABLE)


def test_a_decorated_source_refuses_what_the_inner_one_refuses(base: Config, rollouts: Config) -> None:
    source = {"name": "short_first", "first_tokens": 2, "until_step": 3, "of": {**rollouts, "samples_per_promt": 2}}
    with pytest.raises(ConfigError, match=r"source\.of\.samples_per_promt.*Did you mean 'samples_per_prompt'"):
        load_config({**base, "source": source}, available=AVAILABLE)
    source["of"] = {**rollouts, "samples_per_prompt": 1}
    with pytest.raises(ConfigError, match=r"source\.of\.advantage\.name is grpo"):
        load_config({**base, "source": source}, available=AVAILABLE)


def test_a_carried_column_lies_on_the_response_tokens_of_its_row(
    base: Config, rollouts: Config, weighted: Callable[..., Path]
) -> None:
    data = {"train": str(weighted(lambda number: number + 0.5))}
    source = {**rollouts, "carry": ["weight"]}
    loss = {"name": "row_gradient"}
    _, batches = train(base, data=data, source=source, loss=loss, steps=3)
    for batch in batches:
        assert batch.tokens["weight"].dtype == torch.float32
        for row in range(batch.num_rows):
            number = int(batch.segments["uid"][row][0].partition("@")[0].rpartition(":")[2])
            trained = batch.tokens["loss_weights"][row] > 0
            assert trained.any()
            assert (batch.tokens["weight"][row][trained] == number + 0.5).all()
            before_response = int(torch.nonzero(trained)[0])
            assert (batch.tokens["weight"][row][:before_response] == 0).all()


SAMPLES: dict[str, type[Any]] = {"sft": CrossEntropy, "preference": Dpo, "labels": Kto}


@pytest.mark.parametrize("source", SAMPLES)
def test_a_carried_column_lies_on_every_token_of_its_sample(
    base: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str
) -> None:
    monkeypatch.setattr(SAMPLES[source], "needs", SAMPLES[source].needs | {"weight"})

    def opened(weights: Sequence[Any], name: str = "rows") -> Any:
        rows = [
            {"prompt": f"Say {number}: ", "completion": "word " * number, "label": number % 2, "weight": weight}
            for number, weight in enumerate(weights, start=1)
        ]
        if source == "preference":
            rows = [{**row, "chosen": row["completion"], "rejected": f"not {row['prompt']}"} for row in rows]
        data = {"train": str(write_rows(tmp_path / f"{name}.jsonl", rows)), "max_length": 64}
        collator = {"name": "packed", "max_tokens": 128}
        config = {**base, "source": {"name": source, "carry": ["weight"]}, "data": data, "batch_size": 9}
        with ExitStack() as stack:
            return build_data(load_config({**config, "collator": collator}, available=AVAILABLE), stack).source

    made = opened([number + 0.5 for number in range(7)])
    seen = set[float]()
    for step in (1, 2):
        batch = made.build(step)
        for row in range(batch.num_rows):
            for segment, uid in enumerate(batch.segments["uid"][row].tolist(), start=1):
                (where,) = torch.nonzero(batch.tokens["segment_ids"][row] == segment, as_tuple=True)
                found = set(batch.tokens["weight"][row, where].tolist())
                assert found == {int(uid.rpartition(":")[2]) + 0.5}
                seen |= found
            assert bool((batch.tokens["weight"][row][batch.tokens["segment_ids"][row] == 0] == 0).all())
    assert len(seen) == 7
    assert "column weight: 0.5 to 6.5" in made.summary()["notes"]
    with pytest.raises(CheckpointError, match="carried columns"):
        opened([1.0] * 7).load_state_dict(made.state_dict())
    with pytest.raises(DataError, match=r"bad\.jsonl:2: weight is missing or null, and source\.carry needs it"):
        opened([1.0, None], "bad").summary()


def test_a_loss_and_an_advantage_weigh_a_prompt_by_its_column(
    base: Config, rollouts: Config, weighted: Callable[..., Path]
) -> None:
    data = {"train": str(weighted(lambda _: 3.0))}
    base |= {"data": data, "steps": 1}
    plain, _ = train(base, source=rollouts, loss="policy_gradient")
    assert abs(plain[0]["grad_norm"]) > 1e-4, "without a gradient there is nothing to weigh"
    carried = {**rollouts, "carry": ["weight"]}
    by_loss, _ = train(base, name="loss", source=carried, loss="row_gradient")
    weighed = {**carried, "advantage": "row_weight"}
    by_advantage, _ = train(base, name="advantage", source=weighed, loss="policy_gradient")
    for found in (by_loss, by_advantage):
        assert found[0]["grad_norm"] == pytest.approx(3 * plain[0]["grad_norm"], rel=1e-3)


@pytest.mark.parametrize(("value", "words"), [(None, "holds None"), ("much", "holds 'much'"), (True, None)])
def test_a_row_without_the_carried_number_is_a_bad_row(
    base: Config, rollouts: Config, weighted: Callable[..., Path], value: Any, words: str | None
) -> None:
    path = str(weighted(lambda number: value if number == 5 else number % 2 == 0 if value is True else 1.0))
    source = {**rollouts, "carry": ["weight"]}
    if words is None:
        train(base, data={"train": path}, source=source)
        return
    with pytest.raises(DataError, match=rf"weighted\.jsonl:6: the column 'weight'.*{words}.*on_bad_row: skip"):
        train(base, data={"train": path}, source=source)
    lenient = {"train": {"path": path, "on_bad_row": "skip"}}
    metrics, _ = train(base, data=lenient, source=source, name="lenient")
    assert sum(line["groups/skipped_rows"] for line in metrics) >= 1


def test_a_column_that_no_row_has_is_named_with_its_neighbour(
    base: Config, rollouts: Config, weighted: Callable[..., Path]
) -> None:
    data = {"train": str(weighted(lambda _: 1.0))}
    with pytest.raises(DataError, match=r"'weigth'.*is missing\. Did you mean 'weight'"):
        train(base, data=data, source={**rollouts, "carry": ["weigth"]})
    with pytest.raises(ConfigError, match=r"source\.carry names 'advantages'"):
        train(base, data=data, source={**rollouts, "carry": ["advantages"]})
    with pytest.raises(ConfigError, match=r"loss\.column is 'weight', which `source\.carry` does not name"):
        train(base, data=data, source=rollouts, loss="row_gradient")


class Plain(BatchSource):
    total_steps = 3
    pure = True

    def summary(self) -> dict[str, object]:
        return {}

    def build(self, step: int) -> TrainingBatch:
        raise NotImplementedError

    def epoch(self, step: int) -> float:
        return 1.0


class Counting(DecoratedSource):
    def state_dict(self) -> dict[str, object]:
        return {"inner": super().state_dict(), "seen": 0}


def test_a_decorator_is_as_pure_as_its_source_unless_it_keeps_state_of_its_own() -> None:
    registry = SimpleNamespace(create=lambda *_, **__: Plain())
    context: Any = SimpleNamespace(host=SimpleNamespace(registry=registry))
    settings = DecoratedSourceConfig(name="any", of=SourceConfig(name="plain"))
    assert DecoratedSource(settings, context).pure
    counting = Counting(settings, context)
    assert not counting.pure
    assert counting.reads_only_data, "a plan may still build its first batches"


def test_groups_come_back_from_a_recording_with_their_columns() -> None:
    group = Group("rows:0@0", 0, tuple(make_trajectories([[(3, 4)], [(2, 2)]])), {"weight": 0.25})
    (found,) = groups_of(groups_state([group]))
    assert found.columns == {"weight": 0.25}
    blocks: Any = groups_state([group])["blocks"]
    # Earlier recordings held one block alone.
    (older,) = blocks
    for entry in older["groups"]:
        del entry["columns"]
    assert next(groups_of(older)).columns == {}


class TestPlugin(PluginContract):
    plugin_module = f"spurline_{NAME}.plugin"
    pytestmark: ClassVar = [pytest.mark.processes]


class TestRowWeight(AdvantageContract):
    carry = ("weight",)

    def make_advantage(self) -> Advantage:
        return RowWeight(RowWeightConfig())


class TestRowGradient(LossContract):
    def make_loss(self) -> Loss:
        return RowGradient(RowGradientConfig())
