"""Name the factor by which a gradient is too large or too small, by the numbers of its batch."""

from __future__ import annotations

from dataclasses import dataclass

from spurline_oracle.dump import Dump


@dataclass(frozen=True)
class Scale:
    """A factor that a mistake would multiply gradients by. `text` says which number it is."""

    value: float
    text: str
    words: str = ""


def scales_of(dump: Dump) -> list[Scale]:
    """Return the factors other than 1 that the numbers of a dump can explain, one for each value."""
    batches = max(row.micro_batch for row in dump.rows) + 1
    ranks = dump.facts["num_ranks"]
    rows = dump.rows
    learned = sum(float(row.wanted.sum()) for row in rows)
    counts = {
        "micro-batches": batches,
        "ranks": ranks,
        **({"micro-batches on all ranks": batches * ranks} if ranks > 1 < batches else {}),
        **{f"{name} ranks": size for name, size in dump.facts["layout"].items()},
        **{f"your count {name}": count for name, count in dump.facts["counts"].items()},
    }
    tokens = {
        "all tokens, prompts included": sum(int(row.valid.sum()) for row in rows),
        "all tokens and padding": sum(len(row.tokens) for row in rows),
        "labels, also those of first tokens or padding": sum(float(row.asked.sum()) for row in rows),
        "sequences": sum(len(row.ranges) for row in rows),
        "rows": len(rows),
        "rows of a micro-batch": len(rows) / (batches * ranks),
        **{f"your count {name}": count for name, count in dump.facts["counts"].items()},
    }
    found = [
        Scale(count, f"the number of {name} ({count:g})", "Gradients of parts were summed and not divided.")
        for name, count in counts.items()
    ]
    found += [
        Scale(
            1 / count,
            f"1 / the number of {name} (1/{count:g})",
            "They were divided twice: by a normalizer of the whole update, and by this number.",
        )
        for name, count in counts.items()
        if count
    ]
    if dump.loss["reduction"] == "token_mean":
        found += [
            Scale(
                learned / count,
                f"learned tokens / {name} ({learned:g}/{count:g})",
                "The loss was divided by a count of other things than the learned tokens of this update.",
            )
            for name, count in tokens.items()
            if count
        ]
        found.append(Scale(learned, f"the number of learned tokens ({learned:g})", "The loss was summed, not averaged."))
    own = dump.facts["counts"]
    found += [
        Scale(batches / count, f"micro-batches / your count {name} ({batches}/{count:g})", "Two windows were mixed up.")
        for name, count in own.items()
        if count
    ]
    merged: list[Scale] = []
    for each in found:
        same = [one for one in merged if abs(one.value / each.value - 1) < 1e-9]
        if abs(each.value - 1) < 1e-9:
            continue
        if same:
            merged[merged.index(same[0])] = Scale(each.value, f"{same[0].text} or {each.text}", same[0].words)
        else:
            merged.append(each)
    return merged
