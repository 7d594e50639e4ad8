"""Config files that are made to take all time or memory, or to have something run: refused, with line and fix."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from spurline import load_config
from spurline.config import bounded_yaml
from spurline.config.document import parse_value, read_document
from spurline.errors import ConfigError

MINIMAL = "model: {path: m}\ndata: {train: rows.jsonl}\nsteps: 3\n"

# Within a second each; unbounded, the worst take minutes and gigabytes.
pytestmark = pytest.mark.timeout(60)


def refused(folder: Path, content: str | bytes, name: str = "run.yaml") -> str:
    """The error of reading this file, without the folder in front of its name."""
    path = folder / name
    path.write_bytes(content.encode("utf-8", "surrogatepass") if isinstance(content, str) else content)
    with pytest.raises(ConfigError) as caught:
        read_document(path)
    return str(caught.value).removeprefix(f"{folder}/")


def bomb(levels: int, fan_out: int = 10) -> str:
    """Each level is a list of aliases to the level before: fan_out ** levels values in so many lines."""
    lines = [f"a0: &a0 [{', '.join(['x'] * fan_out)}]"]
    lines += [f"a{level}: &a{level} [{', '.join([f'*a{level - 1}'] * fan_out)}]" for level in range(1, levels)]
    return "\n".join(lines)


def test_aliases_count_as_everything_they_stand_for(tmp_path: Path) -> None:
    assert refused(tmp_path, bomb(9)) == (
        "run.yaml:5: is not valid YAML: there are more than 50000 values, those that aliases repeat counted each time; "
        "long lists belong into a data file. Text that begins with `*` or `&` needs quotes."
    )


def test_merged_mappings_count_as_well(tmp_path: Path) -> None:
    lines = ["a0: &a0 {" + ", ".join(f"k{index}: 1" for index in range(100)) + "}"]
    lines += [f"a{level}: &a{level} [{', '.join([f'*a{level - 1}'] * 30)}]" for level in range(1, 3)]
    assert "more than 50000 values" in refused(tmp_path, "\n".join([*lines, "b: {<<: *a2}"]))


def test_an_anchor_that_is_set_again_counts_from_there_on_without_a_word(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("a: [&x 1, *x, &x 2, *x]\n")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert read_document(path).values == {"a": [1, 1, 2, 2]}


def test_ordinary_anchors_aliases_and_merges_are_read(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("base: &base {rate: 1e-5, names: &names [a, b]}\nnext: {<<: *base, more: *names}\n")
    document = read_document(path)
    assert document.values["next"] == {"more": ["a", "b"], "rate": 1e-5, "names": ["a", "b"]}
    assert document.lines["next.more"] == 2


@pytest.mark.parametrize("text", ["a: " + "[" * 20_000, "- " * 20_000 + "x"])
def test_nesting_has_a_bound(tmp_path: Path, text: str) -> None:
    assert refused(tmp_path, text) == (
        "run.yaml:1: is not valid YAML: lists and mappings are nested more than 64 deep."
    )


def test_values_have_a_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounded_yaml, "MAX_VALUES", 100)
    assert "more than 100 values" in refused(tmp_path, "\n".join(f"k{index}: 1" for index in range(51)))


@pytest.mark.parametrize("name", ["run.yaml", "run.toml"])
def test_a_larger_file_than_a_config_is_not_read(tmp_path: Path, name: str) -> None:
    assert refused(tmp_path, "#" * ((1 << 20) + 1), name) == (
        f"{name}: is larger than a config may be, which is 1048576 bytes."
    )


def test_a_device_without_an_end_is_read_no_further_than_a_config() -> None:
    with pytest.raises(ConfigError, match="larger than a config may be"):
        read_document(Path("/dev/zero"))


def test_a_config_may_come_through_a_pipe() -> None:
    reading, writing = os.pipe()
    os.write(writing, b"steps: 3\n")
    os.close(writing)
    try:
        assert read_document(Path(f"/dev/fd/{reading}")).values == {"steps": 3}
    finally:
        os.close(reading)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (
            "a: 1\nb: " + "9" * 10_000,
            "run.yaml:2: is not valid YAML: a number has 10000 characters",
        ),
        ("b: 0x" + "f" * 10_000, "a number has 10002 characters"),
        ("b: 1." + "9" * 10_000, "a number has 10002 characters"),
        ("a: 1\nb: 2024-13-45", "run.yaml:2: is not valid YAML: '2024-13-45' is no value of its kind"),
        ("a: !!int abc", "run.yaml:1: is not valid YAML: 'abc' is no value of its kind"),
        ("a: &a [*a]", "run.yaml:1: is not valid YAML: an alias stands inside the value of its own anchor."),
        (
            "a: !!python/object/apply:os.system [ls]",
            "the tag !!python/object/apply:os.system is not read; write the value without a tag.",
        ),
        ("%TAG ! tag:yaml.org,2002:python/\n---\na: !name:os.system 1", "the tag !!python/name:os.system is not read"),
        ("a: !mine {b: 1}", "the tag !mine is not read"),
        ("a: 1\nb: \0", "run.yaml:2: is not valid YAML: unacceptable character #x0000"),
        ('a: "\\ud800"', "half a surrogate pair"),
        ("a: 1\na: 2", 'run.yaml:2: is not valid YAML: found duplicate key "a"'),
    ],
)
def test_scalars_and_tags_of_the_wrong_kind_are_refused_with_their_line(tmp_path: Path, text: str, told: str) -> None:
    assert told in refused(tmp_path, text)


def test_another_encoding_is_named(tmp_path: Path) -> None:
    assert refused(tmp_path, "steps: 3".encode("utf-16")) == (
        "run.yaml: is not UTF-8 text (invalid start byte). Save it as UTF-8."
    )


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("a = " + "[" * 100_000, "nests lists and tables too deeply"),
        ("a = " + "9" * 5_000, "is not valid TOML: Exceeds the limit"),
        (".".join("a" * 50_000) + " = 1", "has a dotted key of more than 200 parts"),
    ],
)
def test_toml_is_bounded_as_well(tmp_path: Path, text: str, told: str) -> None:
    assert told in refused(tmp_path, text, "run.toml")


@pytest.mark.parametrize("value", ["[" * 100, "{x: &a [1], y: [*a, !!python/none x]}", "9" * 10_000])
def test_overrides_are_bounded_as_well(tmp_path: Path, value: str) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(MINIMAL)
    with pytest.raises(ConfigError, match="is not valid YAML"):
        load_config(path, [f"optimizer.betas={value}"])


def test_of_very_many_problems_the_first_are_told(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(MINIMAL + "".join(f"k{index}: {index}\n" for index in range(60)))
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    first, *told = str(caught.value).splitlines()
    assert first == f"{path}: has 10 more problems than are told here."
    assert len(told) == 50


def test_a_value_is_quoted_in_part(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(MINIMAL + f"optimizer: {{learning_rate: '{'x' * 100_000}'}}\n")
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    assert len(str(caught.value)) < 1_000


PIECES = st.sampled_from(
    [
        *(
            "a",
            "b: ",
            ": ",
            "- ",
            "? ",
            "\n",
            "\n  ",
            "[",
            "]",
            "{",
            "}",
            ", ",
            "&a ",
            "*a",
            "!!int ",
            "! ",
            "<<: ",
            "|\n",
        ),
        *(
            "'",
            '"',
            "\\",
            "#",
            "%YAML 1.1\n",
            "---\n",
            "...\n",
            "1e9",
            "0x1",
            "2024-01-01",
            "~",
            "\t",
            "\0",
            "\ufeff",
            "é",
        ),
    ]
)


@given(st.lists(PIECES, max_size=40).map("".join))
@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_any_text_is_a_value_or_an_error(text: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            value: Any = parse_value(text)
        except ValueError:
            return
    assert not type(value).__module__.startswith("ruamel.")
