"""The key of cached tokens: everything that changes tokens changes it, and nothing else does."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import pytest
from transformers import AddedToken

from spurline.config.run_config import DataConfig
from spurline.errors import ModelError
from spurline.protocols.tokenization import DatasetToTokenize
from spurline_collation_fast.cache import key as key_module
from spurline_collation_fast.cache.entry import CacheKey
from spurline_collation_fast.cache.key import cache_key, code_version
from spurline_text.configs import HfDatasetConfig
from spurline_text.datasets.hf_dataset import HfDataset
from spurline_text.testing.inputs import tiny_tokenizer


def key_of(path: Path, *, tokenizer: Any = None, dataset: dict[str, Any] | None = None, **data: Any) -> CacheKey:
    config = HfDatasetConfig(path=str(path), **dataset or {})
    settings = DataConfig(train=(config,), **data)
    return cache_key([DatasetToTokenize(HfDataset(config), config)], tokenizer or tiny_tokenizer(), settings)


def test_renaming_and_touching_the_file_keep_the_key(spurline_chat_file: Path) -> None:
    before = key_of(spurline_chat_file)
    renamed = spurline_chat_file.with_name("other.jsonl")
    spurline_chat_file.rename(renamed)
    os.utime(renamed, (1, 1))
    after = key_of(renamed)
    assert after.digest == before.digest
    assert (before.labels, after.labels) == (("chat",), ("other",))


def test_weight_label_order_and_evaluation_data_keep_the_key(spurline_chat_file: Path) -> None:
    before = key_of(spurline_chat_file).digest
    for dataset in ({"weight": 2.0}, {"label": "named"}):
        assert key_of(spurline_chat_file, dataset=dataset).digest == before
    evaluation = (HfDatasetConfig(path="held_out.jsonl"),)
    assert key_of(spurline_chat_file, order={"name": "sequential"}, eval=evaluation).digest == before


@pytest.mark.parametrize(
    "change",
    [
        lambda rows: [*rows[:40], rows[40].replace("say", "Say"), *rows[41:]],
        lambda rows: rows[:-1],
        lambda rows: [*rows, rows[0]],
        lambda rows: [rows[1], rows[0], *rows[2:]],
    ],
    ids=["one letter", "one row less", "one row more", "another order"],
)
def test_a_changed_row_changes_the_key(spurline_chat_file: Path, change: Callable[[list[str]], list[str]]) -> None:
    before = key_of(spurline_chat_file)
    rows = spurline_chat_file.read_text().splitlines()
    spurline_chat_file.write_text("\n".join(change(rows)) + "\n")
    assert key_of(spurline_chat_file).digest != before.digest


@pytest.mark.parametrize(
    "settings",
    [
        *({"max_length": 99}, {"train_on": "all_assistants"}, {"too_long": "drop"}),
        *({"dataset": {"format": "chat"}}, {"dataset": {"columns": {"messages": "messages"}}}),
        *({"dataset": {"on_bad_row": "skip"}}, {"dataset": {"split": "train[:10]"}}),
    ],
    ids=str,
)
def test_a_setting_that_changes_tokens_changes_the_key(spurline_chat_file: Path, settings: dict[str, Any]) -> None:
    assert key_of(spurline_chat_file, **settings).digest != key_of(spurline_chat_file).digest


def test_every_data_setting_counts_unless_it_is_known_not_to(spurline_chat_file: Path) -> None:
    [dataset] = key_of(spurline_chat_file).parts["datasets"]
    assert dataset.keys() - {"fingerprint"} == HfDatasetConfig.model_fields.keys() - {
        "path",
        "weight",
        "share",
        "label",
    }
    data = key_of(spurline_chat_file).parts["data"]
    assert data.keys() == DataConfig.model_fields.keys() - {"train", "eval", "order"}


def test_the_order_of_datasets_counts(spurline_chat_file: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.jsonl"
    other.write_text(spurline_chat_file.read_text().replace("say", "tell"))
    configs = [HfDatasetConfig(path=str(path)) for path in (spurline_chat_file, other)]
    sources = [DatasetToTokenize(HfDataset(config), config) for config in configs]
    data, tokenizer = DataConfig(train=tuple(configs)), tiny_tokenizer()
    keys = {cache_key(chosen, tokenizer, data).digest for chosen in (sources, sources[::-1], sources[:1])}
    assert len(keys) == 3


def changed_tokenizers() -> dict[str, Callable[[Any], Any]]:
    """Changes to a tokenizer's content, one at a time."""

    def from_json(change: Callable[[dict[str, Any]], Any]) -> Callable[[Any], Any]:
        def apply(tokenizer: Any) -> Any:
            from tokenizers import Tokenizer

            content = json.loads(tokenizer.backend_tokenizer.to_str())
            change(content)
            changed = tiny_tokenizer()
            changed._tokenizer = Tokenizer.from_str(json.dumps(content))
            return changed

        return apply

    def swap_two_tokens(content: dict[str, Any]) -> None:
        vocabulary = content["model"]["vocab"]
        vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]

    def with_attribute(name: str, value: Any) -> Callable[[Any], Any]:
        def apply(tokenizer: Any) -> Any:
            setattr(tokenizer, name, value)
            return tokenizer

        return apply

    def with_added_token(tokenizer: Any) -> Any:
        tokenizer.add_tokens([AddedToken("<new>")])
        return tokenizer

    return {
        "vocabulary": from_json(swap_two_tokens),
        "pre-tokenizer": from_json(lambda content: content["pre_tokenizer"].update(add_prefix_space=True)),
        "normalizer": from_json(lambda content: content.update(normalizer={"type": "Lowercase"})),
        "added token": with_added_token,
        "end-of-sequence token": with_attribute("eos_token", "<|pad|>"),
        "chat template": with_attribute("chat_template", "{{ messages }}"),
        "chat template with tools": with_attribute("chat_template", {"default": "{{ messages }}", "tool_use": "x"}),
        "no chat template": with_attribute("chat_template", None),
        "special tokens split": with_attribute("split_special_tokens", True),
    }


@pytest.mark.parametrize("name", changed_tokenizers())
def test_a_change_of_the_tokenizer_changes_the_key(spurline_chat_file: Path, name: str) -> None:
    tokenizer = changed_tokenizers()[name](tiny_tokenizer())
    assert key_of(spurline_chat_file, tokenizer=tokenizer).digest != key_of(spurline_chat_file).digest


def test_using_a_tokenizer_keeps_the_key(spurline_chat_file: Path) -> None:
    tokenizer = tiny_tokenizer()
    tokenizer(["a", "bcd"], truncation=True, max_length=2, padding=True)
    used = json.loads(tokenizer.backend_tokenizer.to_str())
    assert used["truncation"] or used["padding"], "the call leaves its settings behind"
    assert key_of(spurline_chat_file, tokenizer=tokenizer).digest == key_of(spurline_chat_file).digest


def test_a_tokenizer_loaded_from_another_folder_keeps_the_key(spurline_chat_file: Path, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    for name in ("one", "two"):
        tiny_tokenizer().save_pretrained(tmp_path / name)
    first, second = (AutoTokenizer.from_pretrained(tmp_path / name) for name in ("one", "two"))
    assert key_of(spurline_chat_file, tokenizer=first) == key_of(spurline_chat_file, tokenizer=second)


def test_a_slow_tokenizer_is_refused_as_tokenization_would(spurline_chat_file: Path) -> None:
    class Slow:
        is_fast, name_or_path = False, "slow"

    with pytest.raises(ModelError, match="slow tokenizer"):
        key_of(spurline_chat_file, tokenizer=Slow())


DATED = "{% if strftime_now is defined %}{{ strftime_now('%d %b %Y') }}{% endif %}{{ messages }}"


@pytest.mark.parametrize("template", [DATED, {"default": "x", "tool_use": DATED}], ids=["one", "several"])
def test_a_template_that_prints_the_date_has_another_key_every_day(
    spurline_chat_file: Path, template: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def digest_on(day: int, chat_template: Any) -> str:
        class Clock(date):
            @classmethod
            def today(cls) -> date:
                return date(2026, 7, day)

        monkeypatch.setattr(key_module, "date", Clock)
        tokenizer = tiny_tokenizer()
        tokenizer.chat_template = chat_template
        return key_of(spurline_chat_file, tokenizer=tokenizer).digest

    assert digest_on(1, template) == digest_on(1, template) != digest_on(2, template)
    assert digest_on(1, "{{ messages }}") == digest_on(2, "{{ messages }}")


@pytest.mark.parametrize("library", key_module.LIBRARIES)
def test_another_version_of_a_library_changes_the_key(
    spurline_chat_file: Path, library: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, version = key_of(spurline_chat_file), key_module.importlib.metadata.version
    monkeypatch.setattr(
        key_module.importlib.metadata, "version", lambda name: "0" if name == library else version(name)
    )
    assert key_of(spurline_chat_file).digest != before.digest


def test_a_change_of_the_code_changes_its_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    package = tmp_path / "package_of_a_cache_test"
    (package / "inner").mkdir(parents=True)
    (package / "__init__.py").write_text("")
    versions = set()
    for source in ("x = 1", "x = 2", "x = 2  # a comment"):
        (package / "inner" / "module.py").write_text(source)
        versions.add(code_version([package.name]))
    assert len(versions) == 3


def test_the_code_version_is_part_of_the_key(spurline_chat_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = key_of(spurline_chat_file)
    monkeypatch.setattr(key_module, "_TOKEN_CODE", key_module._TOKEN_CODE[1:])
    assert key_of(spurline_chat_file).digest != before.digest
