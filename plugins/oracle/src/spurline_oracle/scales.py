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
    rows, ranks = dump.rows, dump.facts["num_ranks"]
    batches = max(row.micro_batch for row in rows) + 1
    learned = sum(float(row.wanted.sum()) for row in rows)
    given = {f"your count {name}": count for name, count in dump.facts["counts"].items() if count}
    sizes = {
        "the number of micro-batches": batches,
        "the number of ranks": ranks,
        **({"the number of micro-batches on all ranks": batches * ranks} if batches > 1 < ranks else {}),
        **{f"the number of {name} ranks": size for name, size in dump.facts["layout"].items()},
        **given,
    }
    tokens = {
        "all tokens, prompts included": sum(int(row.valid.sum()) for row in rows),
        "all tokens and padding": sum(len(row.tokens) for row in rows),
        "labels, also those of first tokens or padding": sum(float(row.asked.sum()) for row in rows),
        "sequences": sum(len(row.ranges) for row in rows),
        "rows of a micro-batch": len(rows) / (batches * ranks),
        **given,
    }
    summed = "Gradients of parts were summed and not divided."
    twice = "They were divided twice: by a normalizer of the whole update, and by this number."
    other = "The loss was divided by a count of other things than the learned tokens of this update."
    found = [Scale(size, f"{name} ({size:g})", summed) for name, size in sizes.items()]
    found += [Scale(1 / size, f"1 / {name} (1/{size:g})", twice) for name, size in sizes.items()]
    if dump.loss["reduction"] == "token_mean":
        found.append(Scale(learned, f"the number of learned tokens ({learned:g})", "The loss was summed."))
        for name, count in tokens.items():
            found.append(Scale(learned / count, f"learned tokens / {name} ({learned:g}/{count:g})", other))
    for name, count in given.items():
        found.append(Scale(batches / count, f"micro-batches / {name} ({batches}/{count:g})", "Windows were mixed up."))
    merged: dict[str, Scale] = {}
    for each in found:
        key = f"{each.value:.9g}"
        before = f"{merged[key].text} or " if key in merged else ""
        merged[key] = Scale(each.value, before + each.text, merged.get(key, each).words)
    merged.pop("1", None)
    return list(merged.values())
