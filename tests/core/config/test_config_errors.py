"""What a user is told about a broken config: every problem at once, where it is, and the nearest fix."""

from __future__ import annotations

import re
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


def test_unknown_component_gets_a_near_miss_and_what_is_available(failing: Failing) -> None:
    (line,) = failing(MINIMAL + "loss: log_likelihod\n")
    assert (
        "run.yaml:4: loss is 'log_likelihod', but no loss has that name. Did you mean 'log_likelihood'? Available:"
        in line
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


@pytest.mark.parametrize("written", ["Log-Likelihood", "loglikelihood", "log_likelihodo", "log_likelihod"])
def test_a_slip_of_the_pen_is_corrected(failing: Failing, written: str) -> None:
    (line,) = failing(MINIMAL + f"loss: {written}\n")
    assert "Did you mean 'log_likelihood'?" in line


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("trackers: wandb", "trackers is 'wandb'; it must be a list, such as [wandb]."),
        (
            "backend: {part: true}",
            "backend.part is True; it must be a mapping, written `key: value`, or {} for the defaults.",
        ),
        (
            "loss: {name: squared, scale: 0.1}",
            "loss.scale is 0.1; it must be a mapping, written `key: value`.",
        ),
        ("checkpoint: 5", "checkpoint is 5; it must be a mapping, written `key: value`."),
        ("run_dir: null", "run_dir is null, which it cannot be. Give it a value, or leave the line out"),
    ],
)
def test_a_value_of_the_wrong_shape_is_told_the_right_one(failing: Failing, text: str, told: str) -> None:
    (line,) = failing(MINIMAL + text + "\n")
    assert told in line


@pytest.mark.parametrize(
    ("key", "text"),
    [
        ("steps", "steps: true"),
        ("optimizer.learning_rate", "optimizer: {learning_rate: true}"),
        # In a list, under a union with null, and inside a component that is chosen by its name.
        ("optimizer.betas.1", "optimizer: {name: descent, betas: [0.9, false]}"),
        ("backend.rows_per_microbatch", "backend: {rows_per_microbatch: true}"),
        ("trackers.0.every_steps", "trackers: [{name: console, every_steps: true}]"),
    ],
)
def test_true_and_false_are_no_numbers(failing: Failing, key: str, text: str) -> None:
    (line,) = failing(MINIMAL.replace("steps: 3\n", "" if key == "steps" else "steps: 3\n") + text + "\n")
    assert f": {key} is {'False' if 'false' in text else 'True'}: it must be a number, not true or false." in line


def test_a_setting_that_is_a_number_or_true_takes_both_wherever_its_section_stands() -> None:
    class Inner(Section):
        mixed: bool | int = 2
        number: int = 1

    class Outer(Section):
        inner: Inner = Inner()

    assert Outer.model_validate({"inner": {"mixed": True}}).inner.mixed is True
    assert Outer.model_validate({"inner": {"mixed": 3, "number": "4"}}).inner == Inner(mixed=3, number=4)
    with pytest.raises(ValidationError, match="not true or false"):
        Outer.model_validate({"inner": {"number": False}})


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("backend={name:fsdp}", "A space is missing after the colon: `name: fsdp`."),
        ("trackers=[{name:jsonl}]", "A space is missing after the colon: `name: jsonl`."),
        ("steps:5", "is not KEY=VALUE"),
    ],
)
def test_a_colon_without_a_space_is_told_as_such(failing: Failing, override: str, told: str) -> None:
    assert told in "".join(failing(MINIMAL, override))


def test_a_key_path_in_a_file_is_told_to_be_written_inside_each_other(failing: Failing) -> None:
    (line,) = failing(MINIMAL + "optimizer.learning_rate: 1e-4\n")
    assert "`optimizer: {learning_rate: ...}`" in line


@pytest.mark.parametrize("written", ["5", "[packed]", "{name: 5}", "{name: [packed]}", "null", "{name: null}"])
def test_what_is_no_component_at_all_says_how_to_write_one(failing: Failing, written: str) -> None:
    (line,) = failing(MINIMAL + f"collator: {written}\n")
    assert line.startswith("run.yaml:4: collator must be a collator: its name, or a mapping with `name:`. Available: ")


def test_unknown_top_level_key_hints_at_plugins(failing: Failing) -> None:
    (line,) = failing(MINIMAL + "xyz: {}\n")
    assert line.startswith("run.yaml:4: xyz is not a setting. Settings: backend, batch_size,")
    assert line.endswith("A plugin's section needs that plugin in `plugins`.")


def test_a_section_of_an_installed_plugin_that_is_not_listed_says_so(plugins: FakePlugins, tmp_path: Path) -> None:
    plugins.add("loud_metrics")
    path = tmp_path / "run.yaml"
    for written, near in (("loud_metrics", ""), ("loud_metric", "Did you mean 'loud_metrics'? ")):
        path.write_text(MINIMAL + f"{written}: {{}}\n", encoding="utf-8")
        with pytest.raises(ConfigError) as raised:
            load_config(path, available=plugins.available)
        assert str(raised.value).endswith(
            f"run.yaml:4: {written} is not a setting. {near}The plugin 'loud_metrics' is installed, but not listed "
            "under plugins. Add it: plugins: [loud_metrics]."
        )


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
        "From Python also a model."
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


def test_a_section_that_is_null_is_told_how_to_take_the_defaults(failing: Failing) -> None:
    (line,) = failing(MINIMAL + "checkpoint: null\n")
    assert (
        line
        == "run.yaml:4: checkpoint is null, which a section cannot be. Leave it out, or write {}, for the defaults."
    )


def test_broken_item_of_a_list_is_reported_once_with_its_index(failing: Failing) -> None:
    (line,) = failing("model: {path: m}\nsteps: 1\ndata:\n  train:\n    - path: a\n      splt: b\n")
    assert line.startswith("run.yaml:6: data.train.0.splt is not a setting of 'lines'. Did you mean 'split'?")


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


def test_a_character_that_yaml_does_not_take_has_its_line(failing: Failing) -> None:
    (line,) = failing(MINIMAL + "run_dir: \0")
    assert line.startswith("run.yaml:4: is not valid YAML: unacceptable character #x0000")


@pytest.mark.parametrize("value", ["2024-13-45", "!!int abc", "!!int ''"])
def test_a_value_of_which_none_can_be_made_is_a_config_error(failing: Failing, value: str) -> None:
    (line,) = failing(MINIMAL + f"run_dir: {value}\n")
    assert line.startswith("run.yaml: is not valid YAML: ")
    (line,) = failing(MINIMAL, f"run_dir={value}")
    assert f"value {value!r} is not valid YAML: " in line


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


def test_folder_instead_of_a_file_is_a_config_error(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").touch()
    with pytest.raises(ConfigError, match=r"is a folder\. .* a\.yaml\."):
        load_config(tmp_path)


@pytest.mark.parametrize(
    ("name", "content", "told"),
    [
        ("rows.jsonl", '{"messages": []}', r"is data .*`spurline init --data .*rows\.jsonl`"),
        ("config.json", '{"model_type": "qwen3"}', r"is a model .*`model: \{path: .*\}`"),
    ],
)
def test_data_or_a_model_in_the_place_of_a_config_is_told_as_that(
    tmp_path: Path, name: str, content: str, told: str
) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(ConfigError, match=told):
        load_config(tmp_path / name)
    with pytest.raises(ConfigError, match="is a folder" if name == "rows.jsonl" else told):
        load_config(tmp_path)


def test_plugin_that_is_not_installed_is_reported_with_file_and_line(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(MINIMAL + "plugins: [nowhere]\n")
    with pytest.raises(PluginError, match=r"run\.yaml:4: plugins: Plugin 'nowhere' is not installed"):
        load_config(path)


@pytest.mark.parametrize(
    ("text", "fix"),
    [
        ("model:\n  path: m\n data:\n  train: a\n", "Keys of one level begin in the same column"),
        ("model:\n\tpath: m\n", "Indent with spaces, not with tabs."),
        ("run_dir: a: b\n", "text with `: ` needs quotes"),
        ("model:\n  freeze: [*embed*]\n", "Text that begins with `*` or `&` needs quotes."),
    ],
)
def test_broken_indentation_says_how_to_mend_it(tmp_path, text, fix):
    path = tmp_path / "run.yaml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=f"is not valid YAML: .*{re.escape(fix)}"):
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
