"""What a user is told about a broken config: every problem at once, where it is, and the nearest fix."""

from __future__ import annotations

from pathlib import Path

import pytest
from bare_components import BARE
from config_files import MINIMAL, Failing
from fake_plugins import FakePlugins
from pydantic import ValidationError

from spurline import load_config
from spurline.config.section import Section
from spurline.errors import ConfigError, PluginError, UserError
from spurline.plugins.registry import ComponentRegistrar
from spurline.protocols.loss import LossConfig

pytestmark = pytest.mark.usefixtures("bare")


def test_all_problems_are_listed_at_once_in_file_order(failing: Failing) -> None:
    lines = failing(
        "model: {path: m}\n"
        "data:\n"
        "  train: [{path: a, splt: b}]\n"
        "  max_lenght: 5\n"
        "steps: 0\n"
        "collator: pakced\n"
        "optimizer:\n"
        "  betas: [0.9, 2]\n"
    )
    assert [line.split(" ")[:2] for line in lines] == [
        ["run.yaml:3:", "data.train.0.splt"],
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


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("loss: text", "'text' is a source: set source: text."),
        ("schedule: descent", "'descent' is an optimizer: set optimizer: descent."),
        ("backend: curriculum", "'curriculum' is an order: set data.order: curriculum."),
    ],
)
def test_a_name_of_another_kind_is_told_as_such(failing: Failing, text: str, told: str) -> None:
    assert told in "".join(failing(MINIMAL + text + "\n"))


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("trackers: wandb", "trackers is 'wandb'; it must be a list, such as [wandb]."),
        ("loss: {name: squared, scale: 0.1}", "loss.scale is 0.1; it must be a mapping, written `key: value`."),
        ("checkpoint: null", "checkpoint is None; it must be a mapping"),
        ("run_dir: null", "run_dir is null. Give it a value"),
    ],
)
def test_a_value_of_the_wrong_shape_is_told_the_right_one(failing: Failing, text: str, told: str) -> None:
    (line,) = failing(MINIMAL + text + "\n")
    assert told in line


@pytest.mark.parametrize(
    ("train", "told"),
    [
        ("{path: a, share: 0.5}", "data.train has shares with the sum 0.5. The sum must be 1."),
        ("[{path: a, share: 1}, b]", "the sum 1. The sum must be less than 1, since a dataset has no share."),
        ("{path: a, share: 1, weight: 2}", "data.train.0.share and weight are both set. Remove one."),
    ],
)
def test_shares_that_leave_no_rest_for_the_others_or_leave_one_for_none_are_refused(
    failing: Failing, train: str, told: str
) -> None:
    (line,) = failing(MINIMAL.replace("rows.jsonl", train) + "\n")
    assert told in line


@pytest.mark.parametrize(
    ("key", "text"),
    [
        ("steps", "steps: true"),
        ("optimizer.learning_rate", "optimizer: {learning_rate: true}"),
        # In a list, under a union with null, and inside a component that is chosen by its name.
        ("optimizer.betas", "optimizer: {name: descent, betas: [0.9, false]}"),
        ("backend.rows_per_microbatch", "backend: {rows_per_microbatch: true}"),
        ("trackers.0.every_steps", "trackers: [{name: console, every_steps: true}]"),
    ],
)
def test_true_and_false_are_no_numbers(failing: Failing, key: str, text: str) -> None:
    (line,) = failing(MINIMAL.replace("steps: 3\n", "" if key == "steps" else "steps: 3\n") + text + "\n")
    assert f": {key} " in line
    assert "number" in line
    assert "not true or false" in line


def test_a_setting_that_is_a_number_or_true_takes_both_wherever_its_section_stands() -> None:
    class Inner(Section):
        mixed: bool | int = 2
        number: int = 1

    class Outer(Section):
        inner: Inner = Inner()

    assert Outer.model_validate({"inner": {"mixed": True}}).inner.mixed is True
    assert Outer.model_validate({"inner": {"mixed": 3, "number": "4"}}).inner == Inner(mixed=3, number=4)

    class Named(Section):
        weights: dict[str, float] = {}

    with pytest.raises(ValidationError, match="not true or false"):
        Named.model_validate({"weights": {"format": True}})
    with pytest.raises(ValidationError, match="not true or false"):
        Outer.model_validate({"inner": {"number": False}})


@pytest.mark.parametrize("written", ["5", "[packed]", "{name: 5}", "{name: [packed]}", "null", "{name: null}"])
def test_what_is_no_component_at_all_says_how_to_write_one(failing: Failing, written: str) -> None:
    (line,) = failing(MINIMAL + f"collator: {written}\n")
    assert line.startswith("run.yaml:4: collator must be a collator: its name, or a mapping with `name:`. Available: ")


def test_unknown_top_level_key_hints_at_plugins(failing: Failing) -> None:
    (line,) = failing(MINIMAL + "xyz: {}\n")
    assert line.startswith("run.yaml:4: xyz is not a setting. Settings: backend, batch_size,")
    assert line.endswith("A plugin's section needs that plugin in `plugins`.")


def test_an_unknown_component_names_installed_plugins_that_are_not_listed(plugins: FakePlugins) -> None:
    plugins.add("loud_metrics")
    plugins.add("collation_fast")
    config = {"model": {"path": "a"}, "data": {"train": "a"}, "steps": 1, "loss": "shout"}
    with pytest.raises(ConfigError, match=r"no loss has that name.*not listed under plugins: loud_metrics") as raised:
        load_config(config, available=plugins.available)
    # It is known not to have it.
    assert "collation_fast" not in str(raised.value)


@pytest.mark.parametrize("override", ["nowhere.depth=1", "plugins=[nope]"])
def test_what_an_override_made_says_so(tmp_path: Path, override: str) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(MINIMAL, encoding="utf-8")
    with pytest.raises(UserError) as raised:
        load_config(path, [override])
    assert str(raised.value).endswith(f"(from --set {override})")


def test_required_setting_says_what_it_is(failing: Failing) -> None:
    (line,) = failing("model: {}\ndata: {train: a}\nsteps: 1\n")
    assert line == (
        "run.yaml:1: model.path is required. Hub name or local folder with `config.json`, weights and tokenizer. "
        "A Python program may give a model instead."
    )


def test_wrong_choice_lists_the_choices(failing: Failing) -> None:
    (line,) = failing(MINIMAL + "reduction: {name: token_men}\n")
    assert line == (
        "run.yaml:4: reduction.name is 'token_men'; it must be 'token_mean', 'sequence_mean', 'prompt_mean' or "
        "'fixed_norm'. Did you mean 'token_mean'?"
    )


def test_value_that_fits_none_of_several_types_is_one_problem_at_its_own_key(failing: Failing) -> None:
    (line,) = failing(MINIMAL + "backend: {part: {names: 5}}\n")
    assert line.startswith("run.yaml:4: backend.part.names is 5; it must be a list. Or: ")


@pytest.mark.parametrize(("text", "state"), [("", "missing"), ("steps: 1\nepochs: 1\n", "given")])
def test_exactly_one_of_steps_and_epochs_is_needed(failing: Failing, text: str, state: str) -> None:
    (line,) = failing("model: {path: m}\ndata: {train: a}\n" + text)
    assert f"steps and epochs are both {state}. Set exactly one" in line


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


@pytest.mark.parametrize("value", ["2024-13-45", "!!int abc", "!!int ''"])
def test_a_value_of_which_none_can_be_made_is_a_config_error(failing: Failing, value: str) -> None:
    (line,) = failing(MINIMAL + f"run_dir: {value}\n")
    assert line.startswith("run.yaml: is not valid YAML: ")
    (line,) = failing(MINIMAL, f"run_dir={value}")
    assert "is not valid YAML: " in line


@pytest.mark.parametrize("text", ["- 1\n", "just words\n", "7\n"])
def test_file_that_is_no_mapping_says_so(failing: Failing, text: str) -> None:
    assert failing(text) == ["run.yaml: must be a mapping of settings, such as `model: {path: ...}`."]


def test_missing_file_lists_its_neighbours(tmp_path: Path) -> None:
    for name in ("b.yaml", "a.toml", "notes.txt"):
        (tmp_path / name).write_text("")
    with pytest.raises(ConfigError, match=r"run\.yaml: does not exist\. Config files in '.*': a\.toml, b\.yaml\."):
        load_config(tmp_path / "run.yaml")
    with pytest.raises(ConfigError, match="neither does its folder"):
        load_config(tmp_path / "nowhere" / "run.yaml")
    with pytest.raises(ConfigError, match=r"is a folder\. .* b\.yaml\."):
        load_config(tmp_path)


def test_plugin_that_is_not_installed_is_reported_with_file_and_line(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(MINIMAL + "plugins: [nowhere]\n")
    with pytest.raises(PluginError, match=r"run\.yaml:4: plugins: Plugin 'nowhere' is not installed"):
        load_config(path)


def test_an_error_made_without_a_file_gets_its_name_and_keeps_its_notes():
    error = ConfigError.at("loss", "is wrong.")
    error.add_note("Step 3 was saved.")
    located = error.in_file("run.yaml")
    assert (str(located), located.__notes__) == ("run.yaml: loss is wrong.", ["Step 3 was saved."])
    assert located.in_file("other.yaml") is located


def test_a_kind_without_a_default_names_the_plugin_that_has_one(plugins: FakePlugins) -> None:
    def register(registry: ComponentRegistrar) -> None:
        registry.add(LossConfig, "no_such_module:Loss", name="mine")

    available = {**plugins.add("extra", register=register), "models": BARE}
    with pytest.raises(ConfigError) as caught:
        load_config(
            {"model": {"path": "m"}, "data": {"train": "a"}, "steps": 1, "plugins": ["-models", "extra"]},
            available=available,
        )
    assert (
        "loss is required, and no enabled plugin has a default loss. The plugin 'models' has one: take -models out of "
        "plugins. Others: mine."
    ) in str(caught.value)
