"""List the plugins of this project and their components, so that messages can name plugins that are not enabled.

Such plugins are never imported, so the components are listed here. A test compares the list with the plugins.
"""

from __future__ import annotations

import importlib.metadata
import json
import re
import shlex
import tomllib
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import unquote, urlsplit

DEFAULT_PLUGINS = ("text", "models", "preference", "rl", "environments", "ranks", "insight", "planning", "trackers")
"""Plugins that are loaded before the plugins of the config, if they are installed. `-NAME` in the config omits one."""

_TABLE = {
    "text": "dataset/hf dataset/hf_stream tokenization/sequential source/sft source/stream",
    "models": """optimizer/adamw optimizer/adamw_8bit optimizer/sgd optimizer/muon schedule/constant schedule/linear
        schedule/cosine schedule/wsd backend/local loss/cross_entropy loss/dft evaluation/loss command/export
        command/generate""",
    "preference": """
        source/preference source/labels loss/dpo loss/simpo loss/cpo loss/orpo loss/kto report_panel/preference""",
    "reward_models": """
        source/scored_steps loss/bradley_terry loss/step_reward reward/model reward/judge report_panel/reward_model""",
    "rl": """
        source/rollouts collator/rollouts order/reward_adaptive evaluation/answers evaluation/rollouts
        minibatches/by_prompt loss/policy_gradient loss/ppo loss/gspo loss/cispo loss/sapo loss/value correction/tis
        correction/mis correction/geometric_rejection correction/sequence_rejection advantage/grpo advantage/dr_grpo
        advantage/rloo advantage/maxrl advantage/reinforce_pp advantage/gae environment/single_turn environment/custom
        rollout_engine/in_process reward/exact_match reward/function reward/math_verify report_panel/reward
        report_panel/groups report_panel/responses report_panel/policy report_panel/mismatch section/critic
        section/evaluation.generate""",
    "ranks": "section/cluster",
    "insight": """
        report_panel/summary report_panel/health report_panel/loss report_panel/evaluation report_panel/learning_rate
        report_panel/gradient report_panel/throughput report_panel/time_split report_panel/sample_lengths
        report_panel/packing report_panel/samples report_panel/config section/report command/report command/view""",
    "planning": "command/data command/doctor command/init command/plan",
    "trackers": """
        tracker/tensorboard tracker/wandb tracker/mlflow tracker/trackio tracker/swanlab tracker/opentelemetry
        tracker/prometheus""",
    "collation_fast": "tokenization/parallel prefetch/async command/cache",
    "async_rl": """
        source/async_rollouts source/recorded_rollouts rollout_engine/child_process rollout_engine/vllm
        weight_sync/in_process weight_sync/shared_memory weight_sync/disk weight_sync/collective weight_sync/cuda_ipc
        weight_sync/vllm_native report_panel/rollout_timeline""",
    "simulation": "command/simulate",
    "environments": """
        environment/tools environment/by_row environment/gymnasium environment/openenv advantage/by_environment
        report_panel/environments tool_format/auto tool_format/vllm tool_format/hermes tool_format/qwen3_coder
        tool_format/llama3_json tool_format/pythonic tool_format/mistral tool_format/deepseek_v3 tool_format/glm45
        tool_format/harmony tool_format/kimi_k2""",
    "agents": "environment/harness environment/verifiers dataset/verifiers",
    "distillation": "loss/distillation advantage/teacher scorer/served_teacher scorer/privileged_prompt",
    "objectives": """
        loss/dppo loss/ppo_per_row loss/ppo_entropy_target correction/kpop advantage/gdpo advantage/turn_grpo""",
    "evals": "evaluation/lm_eval",
    "curricula": "order/mixture order/success_mixture",
    "oracle": "command/check-gradients",
    "lineage": "section/lineage command/blame command/fork command/verify",
    "fsdp_backend": "backend/fsdp",
    "megatron_backend": "backend/megatron",
}
OFFICIAL: Mapping[str, tuple[str, ...]] = {plugin: tuple(entries.split()) for plugin, entries in _TABLE.items()}
"""Components (KIND/NAME), sections (section/NAME) and commands (command/NAME) by the first plugin that has them."""


def plugin_with(kind: str | None, name: str) -> str | None:
    """Return the plugin of this project with this component (of any kind if `kind` is None), or None without one."""
    for plugin, entries in OFFICIAL.items():
        kinds = [entry.partition("/")[0] for entry in entries if entry.endswith(f"/{name}")]
        if kind in kinds or (kind is None and {*kinds} - {"section", "command"}):
            return plugin
    return None


def section_names() -> list[str]:
    """Return the key paths of all sections that plugins of this project add."""
    entries = (entry for owned in OFFICIAL.values() for entry in owned)
    return [entry.removeprefix("section/") for entry in entries if entry.startswith("section/")]


def plugin_of_kind(kind: str) -> str | None:
    """Return the first plugin of this project that has components of this kind."""
    return next((name for name, entries in OFFICIAL.items() if any(e.startswith(f"{kind}/") for e in entries)), None)


def install_command(plugin: str) -> str:
    """Return the command that installs a plugin of this project, from a checkout if core was installed from one."""
    direct = importlib.metadata.distribution("spurline").read_text("direct_url.json")
    origin: str = json.loads(direct or "{}").get("url", "")
    plugins = Path(unquote(urlsplit(origin).path)).parent / "plugins"
    if not origin.startswith("file:") or not (plugins / plugin).is_dir():
        return f"pip install spurline-{plugin.replace('_', '-')}"
    # Also list the plugins that it needs, since pip would search for them in the package index.
    needed = [plugin]
    for each in needed:
        project = tomllib.loads((plugins / each / "pyproject.toml").read_text())["project"]
        ours = filter(None, (re.match(r"spurline-([a-z-]+)", line) for line in project["dependencies"]))
        needed += [name for match in ours if (name := match[1].replace("-", "_")) not in needed]
    installed = {entry_point.name for entry_point in importlib.metadata.entry_points(group="spurline.plugins")}
    return "pip install " + shlex.join(str(plugins / name) for name in needed if name not in installed - {plugin})


def how_to_enable(plugin: str, *, is_installed: bool = False) -> str:
    """Return how to enable a plugin of this project, as an imperative without a full stop."""
    if plugin in DEFAULT_PLUGINS and is_installed:
        return f"take -{plugin} out of plugins"
    steps = [] if is_installed else [f"install it with `{install_command(plugin)}`"]
    return ", and ".join([*steps, *([] if plugin in DEFAULT_PLUGINS else [f"list it under plugins: [{plugin}]"])])
