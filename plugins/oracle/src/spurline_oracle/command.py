"""The command `spurline check-gradients`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

if TYPE_CHECKING:
    from spurline_oracle.verdict import Verdict


def check_gradients(
    dump: Annotated[Path, typer.Argument(help="The folder that GradientRecorder wrote.")],
    device: Annotated[Literal["auto", "cpu", "cuda"], typer.Option(help="Where the truth is computed.")] = "auto",
) -> None:
    """Compare the gradients of any training stack with the fp64 truth, and name the usual cause of a difference."""
    from spurline_oracle.dump import read_dump
    from spurline_oracle.verdict import judge

    typer.echo(
        "Computing the truth. If the gradients are wrong, about 60 mistakes are tried, which takes longer.", err=True
    )
    verdict = judge(read_dump(dump), device)
    typer.echo(report(verdict))
    raise typer.Exit(0 if verdict.is_clean else 1)


def report(verdict: Verdict) -> str:
    """Return the report on a dump, for people."""
    dump, departure = verdict.dump, verdict.departure
    learned = sum(int((row.wanted > 0).sum()) for row in dump.rows)
    sequences = sum(len(row.ranges) for row in dump.rows)
    lines = [
        f"batch       {sequences} sequences, {learned} learned tokens, {len(dump.micro_batches)} micro-batches, "
        f"{dump.facts['num_ranks']} ranks",
        f"loss        {', '.join(f'{key} {value}' for key, value in dump.loss.items())}",
        f"noise       {verdict.noise.overall:.1e} of {dump.facts['dtype']}, measured on this batch",
        f"difference  {departure.total:.1e} of the fp64 truth over all parameters; the gradient is "
        f"{verdict.factor:.5g} times the truth",
        f"worst       {departure.worst}: {departure.error:.1e}",
    ]
    if verdict.layer is not None:
        lines.append(f"forward     {verdict.layer or 'outputs of all layers agree (first micro-batch)'}")
    if verdict.missing:
        lines.append(f"unchecked   {len(verdict.missing)} parameters (frozen or not given), as {verdict.missing[0]}")
    if verdict.is_clean:
        return "\n".join([*lines, "", "The gradients are right, up to noise."])
    lines += ["", "The gradients are wrong."]
    if departure.excess == float("inf"):
        lines.append(f"The gradient of {departure.worst} is not finite.")
    elif verdict.explanations:
        best, *also = verdict.explanations
        lines += [f"Cause: {best.title}.", f"  {best.words}", f"  It explains all but {best.departure.total:.1e}."]
        lines += [f"Also possible on this batch: {each.title}. {each.words}" for each in also]
    else:
        near = [each for each in verdict.tried[:3] if each.departure.total < departure.total / 2]
        lines.append(
            f"No known mistake explains the difference{'. The closest leave:' if near else ', or comes close.'}"
        )
        lines += [f"  {each.departure.total:.1e}  {each.title or 'the truth'}" for each in near]
    return "\n".join(lines)
