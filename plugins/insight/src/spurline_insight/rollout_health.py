"""Say in words when the numbers of an RL step are off, and what to do about it.

The metrics of one step go in, as in metrics.jsonl; sentences by kind of trouble come out, usually none. The terminal
and the report show them. They judge one step, never a trend.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

LARGEST_MISMATCH = 0.05
"""Mean |trainer - rollout| logprob in nats. Engines of another precision or kernel show 0.01 to 0.03 (TIS, Yao et al.
2025); above this, ratios are wrong rather than noisy."""
LARGEST_CLIPPED = 0.3
"""Share of tokens. Clipped PPO runs mostly show 0.01 to 0.1, GSPO about 0.15 (Zheng et al. 2025)."""
LARGEST_KL_OLD = 0.1
"""Nats per token between the policy before and during one step. PPO's usual stopping rule is 0.01 to 0.03."""
LARGEST_CUT_SHARE = 0.3
"""Share of turns that end at the token limit."""
LARGEST_FAILED_SHARE = 0.05
"""Share of turns that end with an abort or an error."""
LARGEST_REJECTED_SHARE = 0.3
"""Share of tokens that a correction leaves out."""
_NO_ADVANTAGE = 1e-6
"""Advantages this small are rounding."""


def health_words(metrics: Mapping[str, float]) -> dict[str, str]:
    """Return a sentence or two for each thing that is off, by a short name of its kind, without numbers."""
    return dict(_judged(metrics))


def _judged(metrics: Mapping[str, float]) -> Iterator[tuple[str, str]]:
    difference = metrics.get("mismatch/logprob_diff", 0.0)
    # Tokens that come from older weights differ rightly.
    if difference > LARGEST_MISMATCH and metrics.get("staleness/mean", 0.0) <= 0:
        # A run that corrects already needs no such advice, but its engine is as wrong.
        correct = "" if "correction/factor" in metrics else ", or set source.correction"
        yield (
            "mismatch",
            f"Rollout and trainer logprobs differ by {difference:.3f} nats on average: the engine does not compute "
            f"what is trained. Check that both use the same weights, precision and temperature{correct}.",
        )
    largest = max(abs(metrics.get("advantage/max", 0.0)), abs(metrics.get("advantage/min", 0.0)))
    # Groups of one, and a critic, leave advantages other than 0 to equal rewards.
    if metrics.get("groups/zero_variance", 0.0) >= 1 and largest <= _NO_ADVANTAGE:
        yield (
            "equal_rewards",
            "All groups have equal rewards, so nothing is learned in this step. The task is too easy or too hard for "
            "the model, or the reward does not tell answers apart: look at the sample answers.",
        )
    if (missing := metrics.get("groups/refill_missing", 0.0)) > 0:
        yield (
            "refill_missing",
            f"{_count(missing, 'group')} with equal rewards had to be trained on, as the step's limit of draws was "
            "reached before enough others were found. Raise source.max_draws_per_step, or choose prompts that the "
            "model solves sometimes.",
        )
    if (given_up := metrics.get("groups/quarantined", 0.0)) > 0:
        yield (
            "given_up",
            f"{_count(given_up, 'prompt')} had to be given up in this step, as attempts failed and so did their "
            "retries. The run stops once it has given up more different prompts than source.faults.max_quarantined.",
        )
    clipped = metrics.get("policy/clip_fraction_low", 0.0) + metrics.get("policy/clip_fraction_high", 0.0)
    distance = metrics.get("policy/kl_old", 0.0)
    if clipped > LARGEST_CLIPPED or distance > LARGEST_KL_OLD:
        found = (
            f"{clipped:.0%} of tokens are clipped"
            if clipped > LARGEST_CLIPPED
            else f"The policy moves {distance:.2g} nats per token away from where the step began"
        )
        yield (
            "large_update",
            f"{found}: the updates of one step are too large. Lower optimizer.learning_rate, or take fewer "
            "optimizer steps per batch (minibatches.update_epochs, minibatches.prompts_per_minibatch).",
        )
    if (cut_off := metrics.get("response/share_length", 0.0)) > LARGEST_CUT_SHARE:
        yield (
            "cut_off",
            f"{cut_off:.0%} of responses were cut off at the token limit. Raise source.sampling.max_new_tokens, or "
            "make the model stop earlier, as source.overlong does.",
        )
    failed = metrics.get("response/share_abort", 0.0) + metrics.get("response/share_error", 0.0)
    if failed > LARGEST_FAILED_SHARE:
        yield (
            "failed_turns",
            f"{failed:.0%} of responses ended with an abort or an error of the engine. Look at the engine's own log.",
        )
    if (rejected := metrics.get("correction/rejected", 0.0)) > LARGEST_REJECTED_SHARE:
        yield (
            "rejected",
            f"The correction leaves out {rejected:.0%} of tokens, which are generated in vain. Make engine and trainer "
            "agree better, or widen the band of source.correction.",
        )


def _count(number: float, noun: str) -> str:
    return f"{number:.0f} {noun}{'' if number == 1 else 's'}"
