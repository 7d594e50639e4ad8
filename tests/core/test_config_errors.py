"""What a user is told about a broken config: every problem at once, where it is, and the nearest fix."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from spurline import load_config
from spurline.errors import ConfigError, PluginError

MINIMAL = "model: {path: m}\ndata: {train: rows.jsonl}\nsteps: 3\n"

Failing = Callable[..., list[str]]


@pytest.fixture
def failing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Failing:
    """Lines of the error that loading this text gives, the file being called run.yaml."""
    monkeypatch.chdir(tmp_path)

    def load(text: str, *overrides: str, name: str = "run.yaml") -> list[str]:
        Path(name).write_text(text, encoding="utf-8")
        with pytest.raises(ConfigError) as caught:
            load_config(name, overrides)
        return str(caught.value).splitlines()

    return load


def test_all_problems_are_listed_at_once_in_file_order(failing: Failing) -> None:
    lines = failing(
        "model: {path: m}\n"
        "data:\n"
        "  train: rows.jsonl\n"
        "  max_lenght: 5\n"
        "steps: 0\n"
        "collator: pakced\n"
        "optimizer:\n"
        "  betas: [0.9, 2]\n"
    )
    assert [line.split(" ")[:2] for line in lines] == [
        ["run.yaml:4:", "data.max_lenght"],
        ["run.yaml:5:", "steps"],
        ["run.yaml:6:", "collator"],
        ["run.yaml:8:", "optimizer.betas.1"],
    ]


def test_unknown_key_gets_a_near_miss_and_the_settings_there_are(failing: Failing) -> None:
    (line,) = failing(MINIMAL + "collator: {name: packed, max_token: 5}\n")
    assert line == (
        "run.yaml:4: collator.max_token is not a setting of 'packed'. Did you mean 'max_tokens'? "
        "Settings: algorithm, align_to, max_tokens, pad_to_max."
    )


def test_unknown_key_of_a_component_left_to_its_default_is_explained_too(failing: Failing) -> None:
    (line,) = failing(MINIMAL + "collator: {max_token: 5}\n")
    assert "collator.max_token is not a setting of 'packed'. Did you mean 'max_tokens'?" in line


def test_unknown_component_gets_a_near_miss_and_what_is_available(failing: Failing) -> None:
    (line,) = failing(MINIMAL + "loss: cros_entropy\n")
    assert (
        "run.yaml:4: loss is 'cros_entropy', but no loss has that name. Did you mean 'cross_entropy'? Available:"
        in line
    )


@pytest.mark.parametrize("written", ["5", "[packed]", "{name: 5}", "{name: [packed]}", "null", "{name: null}"])
def test_what_is_no_component_at_all_says_how_to_write_one(failing: Failing, written: str) -> None:
    (line,) = failing(MINIMAL + f"collator: {written}\n")
    assert line.startswith("run.yaml:4: collator must be a collator: its name, or a mapping with `name:`. Available: ")


def test_unknown_top_level_key_hints_at_plugins(failing: Failing) -> None:
    (line,) = failing(MINIMAL + "xyz: {}\n")
    assert line.startswith("run.yaml:4: xyz is not a setting. Settings: backend, batch_size,")
    assert line.endswith("A plugin's section needs that plugin in `plugins`.")


def test_required_setting_says_what_it_is(failing: Failing) -> None:
    (line,) = failing("model: {}\ndata: {train: a}\nsteps: 1\n")
    assert line == (
        "run.yaml:1: model.path is required. Hub name or local folder with `config.json`, weights and tokenizer."
    )


def test_wrong_choice_lists_the_choices(failing: Failing) -> None:
    (line,) = failing(MINIMAL + "schedule: {name: cosin}\n")
    assert line == (
        "run.yaml:4: schedule.name is 'cosin'; it must be 'constant', 'linear' or 'cosine'. Did you mean 'cosine'?"
    )


def test_value_that_fits_none_of_several_types_is_one_problem_at_its_own_key(failing: Failing) -> None:
    (line,) = failing(MINIMAL + "backend: {lora: {target_modules: 5}}\n")
    assert line.startswith("run.yaml:4: backend.lora.target_modules is 5; it must be a list. Or: ")


def test_section_that_is_no_mapping_says_so(failing: Failing) -> None:
    (line,) = failing(MINIMAL + "optimizer: adam\n")
    assert line == "run.yaml:4: optimizer is 'adam'; it must be a mapping, written `key: value`."


def test_problem_in_a_named_reward_has_its_key_path(failing: Failing) -> None:
    (line,) = failing(
        MINIMAL + "evaluation:\n  generate:\n    rewards:\n      ok: {name: exact_match, ignore_cas: 1}\n"
    )
    assert line.startswith("run.yaml:7: evaluation.generate.rewards.ok.ignore_cas is not a setting of 'exact_match'.")


def test_broken_item_of_a_list_is_reported_once_with_its_index(failing: Failing) -> None:
    (line,) = failing("model: {path: m}\nsteps: 1\ndata:\n  train:\n    - path: a\n      splt: b\n")
    assert line.startswith("run.yaml:6: data.train.0.splt is not a setting of 'hf'. Did you mean 'split'?")


@pytest.mark.parametrize(("text", "state"), [("", "missing"), ("steps: 1\nepochs: 1\n", "given")])
def test_exactly_one_of_steps_and_epochs_is_needed(failing: Failing, text: str, state: str) -> None:
    (line,) = failing("model: {path: m}\ndata: {train: a}\n" + text)
    assert f"steps and 'epochs' are both {state}. Set exactly one" in line


def test_cross_field_problems_of_components_are_collected(failing: Failing) -> None:
    lines = failing(
        MINIMAL + "collator:\n  max_tokens: 5\nbackend: {rows_per_microbatch: 1, max_tokens_per_microbatch: 1}\n"
    )
    assert [line.split(" ")[1] for line in lines] == ["collator.max_tokens", "backend.rows_per_microbatch"]
    assert lines[0].startswith("run.yaml:5: ")


def test_duplicate_key_is_an_error_with_its_line(failing: Failing) -> None:
    (line,) = failing(MINIMAL + "steps: 4\n")
    assert line.startswith('run.yaml:4: is not valid YAML: found duplicate key "steps"')


def test_syntax_error_has_its_line(failing: Failing) -> None:
    (line,) = failing("model: {path: m}\ndata: [\n")
    assert line.startswith(("run.yaml:2: is not valid YAML: ", "run.yaml:3: is not valid YAML: "))


def test_toml_syntax_error_is_a_config_error(failing: Failing) -> None:
    (line,) = failing("model = [", name="run.toml")
    assert line.startswith("run.toml: is not valid TOML: ")


@pytest.mark.parametrize("text", ["- 1\n", "just words\n", "7\n"])
def test_file_that_is_no_mapping_says_so(failing: Failing, text: str) -> None:
    assert failing(text) == ["run.yaml: must be a mapping of settings, such as `model: {path: ...}`."]


def test_empty_file_names_what_is_required(failing: Failing) -> None:
    assert [line.split(" ")[1] for line in failing("# nothing yet\n")] == ["model", "data"]


def test_missing_file_lists_its_neighbours(tmp_path: Path) -> None:
    for name in ("b.yaml", "a.toml", "notes.txt"):
        (tmp_path / name).write_text("")
    with pytest.raises(ConfigError, match=r"run\.yaml: does not exist\. Config files in '.*': a\.toml, b\.yaml\."):
        load_config(tmp_path / "run.yaml")
    with pytest.raises(ConfigError, match="neither does its folder"):
        load_config(tmp_path / "nowhere" / "run.yaml")


def test_folder_instead_of_a_file_is_a_config_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        load_config(tmp_path)


@pytest.mark.parametrize("written", ["collation_fast", "{a: b}", "[1]", "null"])
def test_plugins_that_are_no_list_of_names_say_how_to_write_them(failing: Failing, written: str) -> None:
    (line,) = failing(MINIMAL + f"plugins: {written}\n")
    assert line.startswith("run.yaml:4: plugins must be a list of plugin names, such as [collation_fast]")


def test_plugin_that_is_not_installed_is_reported_with_file_and_line(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(MINIMAL + "plugins: [nowhere]\n")
    with pytest.raises(PluginError, match=r"run\.yaml:4: plugins: Plugin 'nowhere' is not installed"):
        load_config(path)


def test_a_problem_of_a_dataset_calls_it_by_its_name(tmp_path: Path) -> None:
    config = {"model": {"path": "m"}, "steps": 1}
    for train, name in (
        ([{"path": "a.jsonl"}, {"path": "chats.jsonl", "weight": -1}], "chats.jsonl"),
        ([{"path": "a.jsonl"}, {"path": "chats.jsonl", "label": "chats", "wieght": 1}], "chats"),
    ):
        with pytest.raises(ConfigError, match=rf"data\.train\.1\.\w+ is .* \(dataset {name}\)"):
            load_config({**config, "data": {"train": train}})
