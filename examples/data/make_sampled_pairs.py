"""Write pairs of answers that a policy gave itself, from the rollouts that its run has kept.

    python examples/data/make_sampled_pairs.py RUN_DIR OUT_DIR

Each row of OUT_DIR/train.jsonl and eval.jsonl has the text of a prompt as the model saw it, an answer with the highest
reward of its group, and an answer with a lower one. Train with `data.format: prompt_completion`, which keeps the text.
Prompts of the held-out file are in no training row.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from spurline_rl.kept_rollouts import KeptRollouts

PAIRS_PER_PROMPT = 4
HELD_OUT_PROMPTS = 200


def rewards_by_prompt(run_dir: Path) -> dict[str, dict[str, float]]:
    """Return the reward of each distinct answer, by the text of the prompt. Cut-off answers are left out."""
    found: dict[str, dict[str, float]] = {}
    for attempt in KeptRollouts(run_dir).attempts():
        if attempt.finish_reason == "stop":
            found.setdefault(attempt.turns[0].prompt_text, {})[attempt.info["response"]] = attempt.reward
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description="Write pairs of a policy's own answers.")
    parser.add_argument("run_dir", type=Path, help="run whose rollouts are read")
    parser.add_argument("out_dir", type=Path, help="folder to write to")
    paths = parser.parse_args()
    pairs: list[list[dict[str, str]]] = []
    for prompt, rewards in rewards_by_prompt(paths.run_dir).items():
        best = max(rewards, key=rewards.__getitem__)
        worse = [answer for answer in rewards if rewards[answer] < rewards[best]]
        pairs.append([{"prompt": prompt, "chosen": best, "rejected": answer} for answer in worse[:PAIRS_PER_PROMPT]])
    pairs = [of_prompt for of_prompt in pairs if of_prompt]
    paths.out_dir.mkdir(parents=True, exist_ok=True)
    for name, chosen in (("eval", pairs[:HELD_OUT_PROMPTS]), ("train", pairs[HELD_OUT_PROMPTS:])):
        path = paths.out_dir / f"{name}.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for of_prompt in chosen for row in of_prompt), encoding="utf-8")
        print(f"wrote {path}: {sum(map(len, chosen))} pairs of {len(chosen)} prompts")


if __name__ == "__main__":
    main()
