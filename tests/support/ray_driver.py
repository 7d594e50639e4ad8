"""A process that starts ranks on a Ray cluster and says so in a file: `python ray_driver.py OUT`.

It then waits for ever, in an exchange that one rank alone takes part in.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from spurline.protocols.ranks import RankRequest
from spurline_ranks.group import ClusterRequest, TimeLimits, open_ranks

(out,) = sys.argv[1:]
ranks = open_ranks(
    # The environment of the machines takes precedence.
    RankRequest(2, launch="ray", variables={"SAID_TO_RANKS": "no"}),
    "rank_workers:Worker",
    (),
    TimeLimits(120.0, 600.0, 600.0),
    cluster=ClusterRequest(env_vars={"SAID_TO_RANKS": "yes"}),
)
answers = ranks.call("describe")
said = {
    "pids": [answer["pid"] for answer in answers],
    "said": [answer["environment"].get("SAID_TO_RANKS") for answer in answers],
}
Path(f"{out}.part").write_text(json.dumps(said))
Path(f"{out}.part").rename(out)
ranks.call("waits", "exchange")
