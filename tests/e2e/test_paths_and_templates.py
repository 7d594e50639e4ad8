"""What `plan` says of templates that leave things out and of paths, and runs looked at from another folder."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from run_helpers import Config, Spurline, WriteConfig

TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
ROW = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}], "tools": [TOOL]}


def test_plan_names_the_row_whose_tools_the_template_leaves_out(
    base_config: Config, spurline: Spurline, tmp_path: Path
) -> None:
    (tmp_path / "rows.jsonl").write_text(json.dumps(ROW), encoding="utf-8")
    base_config["data"] = {"train": "rows.jsonl"}
    base_config["collator"]["max_tokens"] = 4096
    code, _, problems = spurline("plan", base_config)
    assert code == 2
    assert f"{tmp_path}/rows.jsonl:1: tools: the chat template of the tokenizer" in problems
    base_config["model"]["chat_template"] = "chatml"
    assert spurline("plan", base_config)[0] == 0


def test_plan_names_the_tools_environment_whose_template_mentions_no_tools(
    rl_config: Config, spurline: Spurline
) -> None:
    rl_config["source"]["environment"] |= {"name": "tools"}
    code, _, problems = spurline("plan", rl_config)
    assert code == 2
    assert "environment tools: tools: the chat template" in problems


def test_a_run_with_relative_paths_is_reported_exported_and_resumed_from_another_folder(
    base_config: Config,
    write_config: WriteConfig,
    spurline: Spurline,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "rows.jsonl").write_bytes(Path(base_config["data"]["train"]).read_bytes())
    (tmp_path / "model").symlink_to(base_config["model"]["path"])
    base_config["data"]["train"], base_config["model"]["path"] = "rows.jsonl", "model"
    base_config |= {"steps": 2, "schedule": "constant"}
    config = write_config(base_config)
    run_dir = base_config["run_dir"]
    monkeypatch.chdir(tmp_path)
    assert spurline("train", config)[0] == 0
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    assert spurline("report", run_dir)[0] == 0
    assert spurline("export", run_dir, elsewhere / "exported")[0] == 0
    code, out, _ = spurline("train", config, "--set", "steps=3")
    assert (code, "Finished at step 3" in out) == (0, True)
