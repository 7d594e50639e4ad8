"""Where one prompt's rows end and the next one's begin, derived from the prompt uids of the rows themselves.

Step-wise training makes one row per turn, so prompts differ in rows; nothing but the uids says which belong together.
"""

from __future__ import annotations

from spurline.data.batch import TrainingBatch


def prompt_boundaries(batch: TrainingBatch) -> list[tuple[str, int, int]]:
    """(uid, first row, row after the last) of each prompt, in row order; padding rows must be gone.

    Rows of one prompt must be neighbours, and all segments of a row must be of one prompt: a ValueError names the uid
    for which that is not so.
    """
    assert not bool(batch.is_padding_row.any()), "padding rows belong to no prompt"
    found: list[tuple[str, int, int]] = []
    ended: set[str] = set()
    for row in range(batch.num_rows):
        uid = _uid_of_row(batch, row)
        if found and found[-1][0] == uid:
            found[-1] = (uid, found[-1][1], row + 1)
            continue
        if uid in ended:
            raise ValueError(
                f"the rows of prompt {uid!r} are not neighbours: row {row} comes after another prompt's rows"
            )
        ended.add(uid)
        found.append((uid, row, row + 1))
    return found


def _uid_of_row(batch: TrainingBatch, row: int) -> str:
    uids = sorted(set(batch.segments["uid"][row].tolist()))
    if len(uids) != 1:
        raise ValueError(f"row {row} holds segments of several prompts: {', '.join(map(str, uids))}")
    return str(uids[0])
