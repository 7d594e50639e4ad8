"""`plan` and `train` find sequences longer than the model's positions before training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from run_helpers import Config, Spurline, train, write_rows
from transformers import GPT2Config, GPT2LMHeadModel

from spurline.config.loading import load_config
from spurline.errors import ConfigError
from spurline.protocols.dataset import Longest
from spurline_models.lengths import check_lengths
from spurline_models.testing.inputs import write_tiny_model
from spurline_text.testing.inputs import tiny_tokenizer

POSITIONS = 64


@pytest.fixture
def long_rows(tmp_path: Path) -> Path:
    """Forty short rows, and one of 300 characters, a token each."""
    lengths = [4] * 20 + [300] + [4] * 20
    rows = [
        {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b" * length}]}
        for length in lengths
    ]
    return write_rows(tmp_path / "long.jsonl", rows)


def learned_positions(folder: Path) -> Path:
    tokenizer = tiny_tokenizer()
    shape = GPT2Config(vocab_size=len(tokenizer), n_positions=POSITIONS, n_embd=16, n_layer=1, n_head=2)
    GPT2LMHeadModel(shape).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def with_model(config: Config, folder: Path, rows: Path, **model: Any) -> Config:
    data = {"train": str(rows), "max_length": 512}
    collator = {"name": "packed", "max_tokens": 512}
    return config | {"model": {"path": str(folder), **model}, "data": data, "collator": collator, "steps": 2}


@pytest.mark.parametrize("command", ["plan", "train"])
@pytest.mark.parametrize("insists", [False, True])
def test_a_sample_beyond_a_learned_table_is_refused(
    spurline: Spurline, base_config: Config, long_rows: Path, tmp_path: Path, command: str, insists: bool
) -> None:
    folder = learned_positions(tmp_path / "gpt2")
    config = with_model(base_config, folder, long_rows, allow_extrapolation=insists)
    code, _, err = spurline(command, config)
    assert code == 2
    assert "data.max_length allows sample long:20 (rows counted from 0) with 322 tokens" in err
    assert f"the model of {folder} has 64 positions (max_position_embeddings). Set data.max_length: 64" in err
    assert "allow_extrapolation cannot help" in err


@pytest.mark.parametrize("command", ["plan", "train"])
def test_a_sample_beyond_rotary_positions_is_refused_unless_one_insists(
    spurline: Spurline, base_config: Config, long_rows: Path, tmp_path: Path, command: str
) -> None:
    folder = write_tiny_model(tmp_path / "rotary", max_position_embeddings=POSITIONS)
    code, _, err = spurline(command, with_model(base_config, folder, long_rows))
    assert code == 2
    assert "long:20 (rows counted from 0) with 322 tokens" in err
    assert "Or set model.allow_extrapolation: true" in err
    insisting = with_model(base_config, folder, long_rows, allow_extrapolation=True)
    code, out, err = spurline(command, insisting)
    assert code == 0, err
    assert "long:20 (rows counted from 0) has 322 tokens, beyond the 64 positions of the model" in out


def test_scaled_rotary_positions_reach_further(
    spurline: Spurline, base_config: Config, long_rows: Path, tmp_path: Path
) -> None:
    folder = write_tiny_model(tmp_path / "rotary", max_position_embeddings=POSITIONS)
    rope = {"rope_type": "yarn", "rope_theta": 1e4, "original_max_position_embeddings": POSITIONS}
    for factor, expected in ((4.0, 2), (8.0, 0)):
        overrides = {"rope_parameters": {**rope, "factor": factor}}
        config = with_model(base_config, folder, long_rows, config_overrides=overrides)
        code, _, err = spurline("plan", config)
        assert code == expected, err
        assert expected == 0 or "rope scaling 'yarn' with factor 4" in err


def test_the_longest_sample_counts_whether_it_is_trained_on_or_held_out(
    spurline: Spurline, base_config: Config, long_rows: Path, tmp_path: Path
) -> None:
    config = with_model(base_config, learned_positions(tmp_path / "gpt2"), Path(base_config["data"]["train"]))
    code, _, err = spurline("plan", config)
    assert (code, err) == (0, "")
    assert train(config).status == "finished"
    config["data"]["eval"] = str(long_rows)
    code, _, err = spurline("train", config)
    assert (code, "long:20 (rows counted from 0) with 322 tokens" in err) == (2, True)


@pytest.mark.parametrize("command", ["plan", "train"])
def test_a_prompt_and_its_response_must_fit_together(
    spurline: Spurline, rl_config: Config, tmp_path: Path, command: str
) -> None:
    folder = write_tiny_model(tmp_path / "rotary", max_position_embeddings=POSITIONS)
    rl_config["model"] = {"path": str(folder)}
    rl_config["source"]["sampling"] = {"max_new_tokens": 60}
    code, _, err = spurline(command, rl_config)
    assert code == 2
    assert "source.sampling.max_new_tokens is 60, and the prompt of" in err
    assert "the model of" in err
    assert "has 64 positions" in err
    [most] = [int(word.split(" ")[0]) for word in err.split("Set it to ")[1:]]
    rl_config["source"]["sampling"] = {"max_new_tokens": most}
    code, _, err = spurline("plan", rl_config)
    assert (code, err) == (0, "")


def test_an_engine_that_takes_less_than_prompts_need_is_refused(rl_config: Config) -> None:
    source = rl_config["source"] | {"name": "async_rollouts", "max_staleness": 0}
    source["engine"] = {"name": "vllm", "max_model_len": 20}
    loaded = load_config(rl_config | {"plugins": ["async_rl"], "source": source})

    class Prompts:
        def longest(self) -> Longest:
            return Longest(30, "rows.jsonl:7", "source.sampling.max_new_tokens", prompt_tokens=24)

    with pytest.raises(ConfigError, match=r"source\.engine allows 20 tokens .* needs 30, including 24 .* limit to 30"):
        check_lengths(loaded, Prompts(), ())  # type: ignore[arg-type]
    source["engine"]["max_model_len"] = 4096
    loaded = load_config(rl_config | {"plugins": ["async_rl"], "source": source})
    with pytest.raises(ConfigError, match=r"source\.engine allows 4,096 tokens .* 512 positions .* limit to 512"):
        check_lengths(loaded, Prompts(), ())  # type: ignore[arg-type]
