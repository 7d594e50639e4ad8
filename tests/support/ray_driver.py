"""A process that starts ranks on a Ray cluster and says so in a file: `python ray_driver.py OUT WORKING_DIR`.

It then waits for ever, in an exchange that one rank alone takes part in.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from spurline.protocols.ranks import RankRequest
from spurline_ranks.group import ClusterRequest, RuntimeEnv, TimeLimits
from spurline_ranks.launch import open_ranks

out, folder = sys.argv[1:]
env = RuntimeEnv({"SAID_TO_RANKS": "yes"}, folder)
ranks = open_ranks(
    # What is said for the machines has the last word.
    RankRequest(2, launch="ray", variables={"SAID_TO_RANKS": "no"}),
    "rank_workers:Worker",
    (),
    TimeLimits(120.0, 600.0, 600.0),
    cluster=ClusterRequest(runtime_env=env),
)
answers = ranks.call("describe")
said = {
    "pids": [answer["pid"] for answer in answers],
    "said": [answer["environment"].get("SAID_TO_RANKS") for answer in answers],
    "folders": [sorted(path.name for path in Path(answer["folder"]).iterdir()) for answer in answers],
}
Path(f"{out}.part").write_text(json.dumps(said))
Path(f"{out}.part").rename(out)
ranks.call("waits", "exchange")
