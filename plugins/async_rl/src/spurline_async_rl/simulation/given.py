"""The workload that the options of `spurline simulate` describe, on top of what an earlier run measured."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from spurline.errors import UserError
from spurline_async_rl.simulation.distributions import Constant, Distribution, LogNormal, Stragglers
from spurline_async_rl.simulation.measured import measured_workload
from spurline_async_rl.simulation.prediction import Knobs
from spurline_async_rl.simulation.workload import Outcomes, Workload, saturating


@dataclass(frozen=True)
class GivenNumbers:
    """Options, None where one was not given; see the command's help."""

    from_run: Path | None = None
    group_seconds: float | None = None
    sigma: float = 0.0
    stragglers: str | None = None
    saturation: int | None = None
    step_seconds: float | None = None
    publish_seconds: float | None = None
    pause_seconds: float | None = None
    left_out: float | None = None


def given_workload(numbers: GivenNumbers, knobs: Knobs, origin: str) -> Workload:
    """Raises UserError when the numbers do not suffice, or cannot be."""
    if numbers.from_run is not None:
        base = measured_workload(numbers.from_run)
    elif numbers.group_seconds is None or numbers.step_seconds is None:
        missing = [
            option
            for option, value in (("--group-seconds", numbers.group_seconds), ("--step-seconds", numbers.step_seconds))
            if value is None
        ]
        raise UserError(
            f"{origin}: how long things take is not known: {' and '.join(missing)} missing. Give --from RUN_DIR, an "
            "earlier run of source async_rollouts that measured it, or --group-seconds, the time of one group with "
            "all its attempts, and --step-seconds, the time of one update."
        )
    else:
        base = Workload(Constant(1.0), Constant(1.0), knobs.batch_size)
    workload = _with_groups(base, numbers, knobs)
    if numbers.step_seconds is not None:
        told = f"{numbers.step_seconds:g} s for a step of {knobs.batch_size} groups, as given"
        workload = replace(
            workload,
            train_s=Constant(numbers.step_seconds),
            batch_size=knobs.batch_size,
            basis=[*workload.basis, told],
        )
    return _with_publishes(_with_outcomes(workload, numbers), numbers)


def parse_stragglers(text: str) -> tuple[float, float]:
    """Share and factor of `0.01x10`. Raises UserError."""
    match = re.fullmatch(r"\s*([0-9.]+)\s*(%?)\s*x\s*([0-9.]+)\s*", text)
    try:
        share, factor = (float(match[1]) / (100 if match[2] else 1), float(match[3])) if match else (2.0, 0.0)
    except ValueError:
        share, factor = 2.0, 0.0
    if not (0 <= share <= 1 and factor > 0):
        raise UserError(
            f"--stragglers {text}: expected SHARExFACTOR, such as 0.01x10: one group in a hundred takes ten times as "
            "long."
        )
    return share, factor


def _with_groups(base: Workload, numbers: GivenNumbers, knobs: Knobs) -> Workload:
    workload, basis = base, list(base.basis)
    if numbers.group_seconds is not None:
        group_s: Distribution = LogNormal(numbers.group_seconds, numbers.sigma)
        basis.append(f"{numbers.group_seconds:g} s for a group, lognormal with sigma {numbers.sigma:g}, as given")
        workload = replace(workload, group_s=group_s)
    elif numbers.sigma:
        raise UserError("--sigma says how far --group-seconds spread, which is not given. Give both, or neither.")
    if numbers.stragglers is not None:
        share, factor = parse_stragglers(numbers.stragglers)
        basis.append(f"{share:.2%} of the groups take {factor:g} times as long, as given")
        workload = replace(workload, group_s=Stragglers(workload.group_s, share, factor))
    saturation = numbers.saturation
    if saturation is None and numbers.group_seconds is not None:
        saturation = max(1, -(-knobs.max_running // knobs.engines))
    if saturation is not None:
        why = "as given" if numbers.saturation is not None else "as many as the config runs"
        basis.append(
            f"engines are saturated by {saturation} groups each ({why}): fewer are no faster, more share what these do"
        )
        workload = replace(workload, speed=saturating(saturation))
    return replace(workload, basis=basis)


def _with_outcomes(workload: Workload, numbers: GivenNumbers) -> Workload:
    if numbers.left_out is None:
        return workload
    if not 0 <= numbers.left_out < 1:
        raise UserError(f"--left-out {numbers.left_out:g}: a share is needed, at least 0 and less than 1.")
    told = f"{numbers.left_out:.1%} of the groups are left out for equal rewards, as given"
    return replace(
        workload,
        outcomes=Outcomes(numbers.left_out, workload.outcomes.quarantined),
        basis=[*workload.basis, told],
    )


def _with_publishes(workload: Workload, numbers: GivenNumbers) -> Workload:
    publish_s, pause_s = numbers.publish_seconds, numbers.pause_seconds
    if publish_s is None and pause_s is None:
        known = workload.transfer_s + workload.pause_s > 0 or numbers.from_run is not None
        basis: Sequence[str] = workload.basis if known else [*workload.basis, "publishing weights takes no time"]
        return replace(workload, basis=basis)
    whole = publish_s if publish_s is not None else workload.transfer_s + workload.pause_s
    still = pause_s if pause_s is not None else whole
    if still > whole:
        raise UserError(
            f"--pause-seconds {still:g}: engines cannot stand still longer than the {whole:g} s that a publish takes. "
            "Raise --publish-seconds."
        )
    told = f"{whole:g} s for a publish, engines standing still for {still:g} s of it, as given"
    return replace(workload, transfer_s=whole - still, pause_s=still, basis=[*workload.basis, told])
