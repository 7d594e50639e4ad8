"""An order of files for `-n N --dist loadfile`: long ones first, so that no worker ends alone with one.

xdist itself begins with the files that have the most tests, whose tests are the shortest.
"""

from __future__ import annotations

from pathlib import PurePath
from typing import Any

from xdist.scheduler import LoadFileScheduling

TOGETHER = {"vllm": "vllm", "ray": "ray", "cluster": "ray"}
"""Words in names of files -> what the files share. One worker runs them all, as it takes long to start."""
LONG = (
    *TOGETHER.values(),
    "e2e/test_async",
    "e2e/test_kills",
    "megatron_backend/",
    "fsdp_backend/",
    "e2e/",
    "ranks/",
    "rl/",
)
"""Parts of names of files, those that take the longest first."""


class LongestFirst(LoadFileScheduling):
    """A scheduler that gives a worker the longest of the files that are left."""

    def _split_scope(self, nodeid: str) -> str:
        file = super()._split_scope(nodeid)
        words = PurePath(file).stem.split("_")
        return next((shared for word, shared in TOGETHER.items() if word in words), file)

    def _assign_work_unit(self, node: Any) -> None:
        # Among equals, xdist's own order.
        self.workqueue.move_to_end(min(self.workqueue, key=_place), last=False)
        super()._assign_work_unit(node)


def _place(scope: str) -> int:
    return next((place for place, part in enumerate(LONG) if part in scope), len(LONG))
