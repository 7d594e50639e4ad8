"""For a process that will be killed: ranks that are idle, wait for each other, and compute. Tells where they are."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from pathlib import Path

from spurline.protocols.ranks import RankRequest
from spurline_ranks.group import TimeLimits
from spurline_ranks.processes import LocalRanks


def main(out: Path) -> None:
    limits = TimeLimits(120.0, 600.0, 600.0)
    groups = [LocalRanks(RankRequest(2), "rank_workers:Worker", (), limits) for _ in range(5)]
    pids = [pid for group in groups for pid in group.call("pid")]
    for group, how in zip(groups[1:], ("exchange", "receive", "torch", "alone"), strict=True):
        threading.Thread(target=group.call, args=("waits", how), daemon=True).start()
    time.sleep(0.5)
    ports = [group.port for group in groups]
    begun = out.with_suffix(".part")
    begun.write_text(json.dumps({"pids": pids, "ports": ports}))
    os.rename(begun, out)
    time.sleep(600)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
