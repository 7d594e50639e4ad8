"""Take the pictures of reports that README.md and the documentation show.

    make quickstart
    python docs/picture.py runs/rl_sort/report.html docs/images/report.png

    python benchmarks/async_throughput.py --plot async_throughput.html
    python docs/picture.py async_throughput.html docs/images/async_throughput.png --height 1290

Needs Chromium or Chrome on the PATH, and nothing of Spurline: the page is drawn as a reader's browser draws it.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
from pathlib import Path

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
WIDTH, HEIGHT = 1280, 1340
DRAWING_MS = 10_000
"""Time of the page's own clock that its plots get."""
TIMEOUT_S = 120


def main() -> int:
    """Take the picture; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("report", type=Path, help="report.html of a run")
    parser.add_argument("picture", type=Path, help="PNG to write")
    parser.add_argument("--height", type=int, default=HEIGHT, help="pixels")
    arguments = parser.parse_args()
    browser = next((found for name in BROWSERS if (found := shutil.which(name))), None)
    if browser is None:
        print(f"No browser is on the PATH. Install Chromium. Looked for: {', '.join(BROWSERS)}.", file=sys.stderr)
        return 2
    if not arguments.report.is_file():
        print(f"{arguments.report} is no file. Run `make quickstart` first.", file=sys.stderr)
        return 2
    command = [
        *(browser, "--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"),
        f"--window-size={WIDTH},{arguments.height}",
        f"--virtual-time-budget={DRAWING_MS}",
        f"--screenshot={arguments.picture.resolve()}",
        arguments.report.resolve().as_uri(),
    ]
    result = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S)
    if result.returncode:
        print(result.stderr, file=sys.stderr)
    return result.returncode


if __name__ == "__main__":
    sys.exit(main())
