"""For a process that will be killed: ranks that are idle, wait for each other, and compute. Tells where they are."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from pathlib import Path

import psutil
from listening import listening
from warm_children import ForkedChildren

from spurline.protocols.ranks import RankRequest
from spurline_concurrency import child
from spurline_ranks.group import TimeLimits, open_ranks


def main(out: Path) -> None:
    # Ranks are forked from a process that has imported what they need.
    setattr(child, "subprocess", ForkedChildren())  # noqa: B010 - another type than the module's
    limits = TimeLimits(120.0, 600.0, 600.0)
    groups = [open_ranks(RankRequest(2), "rank_workers:Worker", (), limits) for _ in range(5)]
    pids = [pid for group in groups for pid in group.call("pid")]
    for group, how in zip(groups[1:], ("exchange", "receive", "torch", "alone"), strict=True):
        threading.Thread(target=group.call, args=("waits", how), daemon=True).start()
    time.sleep(0.5)
    # The stores where the ranks meet.
    ports = sorted(port for _, _, port in listening([psutil.Process()]))
    begun = out.with_suffix(".part")
    begun.write_text(json.dumps({"pids": pids, "ports": ports}))
    os.rename(begun, out)
    time.sleep(600)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
