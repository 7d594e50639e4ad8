"""Pack all that `gpu_all.py` needs on a machine with a GPU and no network into one archive.

    python benchmarks/gpu_bundle.py [--python 3.12] [--out FILE] [--have FILE] [--limit-mib 60]

The archive has wheels of Spurline and of what it needs, the benchmarks, `tests/gpu` with what these import, the
examples, a README and `run.sh`. That machine must have Linux on x86-64, this version of Python, PyTorch, transformers,
and what these two need themselves. `--have` names a file with more packages that it has, one a line as `pip list` or
`pip freeze` print them: they are left out.

The versions are those of constraints.txt. Wheels are installed without looking at their dependencies, so that the
versions of PyTorch and transformers on that machine stay. Left out are numba and llvmlite, which alone would fill the
archive: without them the plugin `collation_fast` is off, and batches are built by the collators of the core. Other
people's wheels lose tests, headers and parts of Arrow that nothing here imports. Wheels in the archive are not
compressed, because the archive is, and better so.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterable
from fnmatch import fnmatchcase
from pathlib import Path

from gpu_phases.device import ROOT, commit

NEEDED = """
annotated-types pluggy pydantic pydantic_core typing-inspection ruamel.yaml typer annotated-doc shellingham rich
markdown-it-py mdurl Pygments xxhash psutil plotly narwhals aiohttp aiohappyeyeballs aiosignal attrs frozenlist
multidict propcache yarl
datasets dill multiprocess pyarrow pandas python-dateutil
"""
"""What Spurline's packages need, and PyTorch and transformers do not."""
HELPFUL = "peft accelerate liger-kernel megatron-core trl"
"""What makes more phases run."""
FOR_TESTS = "pytest iniconfig pytest-timeout hypothesis sortedcontainers"
CARRIED = " ".join((NEEDED, HELPFUL, FOR_TESTS)).split()
TRIMMED = (
    "*/tests/*",
    "*/include/*",
    "*.pyx",
    "*.pxd",
    "*.pxi",
    "*.cpp",
    "pyarrow/*flight*",
    "pyarrow/*s3*",
    "pyarrow/*azure*",
    "pyarrow/*gcs*",
    "pyarrow/src/*",
    "plotly/labextension/*",
    "*.data/data/share/jupyter/*",
)
"""Files that are left out of other people's wheels."""
FILES = ("benchmarks", "examples", "tests/conftest.py", "tests/gpu", "tests/support", "pyproject.toml", "LICENSE")
PRESET = 1
"""The effort of the compression. The highest gains about a tenth, and takes minutes."""
PLATFORMS = [f"manylinux_2_{minor}_x86_64" for minor in (28, 27, 24, 17, 12, 5)]
PLATFORMS += ["manylinux2014_x86_64", "manylinux2010_x86_64", "manylinux1_x86_64"]

README = """\
# Spurline on a GPU, without a network

1. Unpack: tar xf {archive}   (or: python3 -m tarfile -e {archive})
2. Run:    sh {folder}/run.sh --out results --budget 540

`run.sh` makes a virtual environment beside itself that sees the packages of `python3` (set PYTHON for another one: it
must be Python {python} with PyTorch and transformers), and unpacks the wheels into it, for which it needs no pip. Its
arguments are those of `benchmarks/gpu_all.py`: --help explains them. A second call with --skip-done goes on where the
first one ended. Bring back results/results.jsonl, table.md, gpu-results.md, log.txt and the pictures.

Commit {commit}. Left out, because that machine was said to have them: {left_out}.
"""
RUN = """\
#!/bin/sh
# Unpack what lies in wheels/ into a virtual environment, and run benchmarks/gpu_all.py with these arguments.
set -e
here=$(cd "$(dirname "$0")" && pwd)
unset PYTHONPATH
if [ ! -e "$here/venv/complete" ]; then
  # The option --system-site-packages would not see the packages of a python3 that is in a virtual environment itself.
  "${PYTHON:-python3}" -m venv --without-pip --clear "$here/venv"
  "${PYTHON:-python3}" - "$here" <<'PYTHON_CODE'
import pathlib, sys, zipfile
here = pathlib.Path(sys.argv[1])
seen = [path for path in sys.path if path.endswith(("site-packages", "dist-packages"))]
(place,) = here.glob("venv/lib/python*/site-packages")
(place / "machine.pth").write_text("".join(f"import site; site.addsitedir({path!r})\\n" for path in seen))
for wheel in sorted(here.glob("wheels/*.whl")):
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(place)
# Wheels may keep some of their modules in a folder for pip to move.
for module in place.glob("*.data/*lib/*"):
    module.rename(place / module.name)
PYTHON_CODE
  "$here/venv/bin/python" - <<'PYTHON_CODE'
import importlib
for name in ("peft", "datasets", "spurline"):
    try:
        importlib.import_module(name)
    except ImportError as error:
        print(f"{name} cannot be imported: {error}", flush=True)
        # Without the others some phases fail, and say so.
        if name == "spurline":
            raise
PYTHON_CODE
  touch "$here/venv/complete"
fi
exec "$here/venv/bin/python" "$here/benchmarks/gpu_all.py" "$@"
"""


def plain(name: str) -> str:
    """Return the name of a package as an index spells it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def versions() -> dict[str, str]:
    """Return the tested version of each package."""
    found: dict[str, str] = {}
    for file in ("constraints.txt", "tests/constraints.txt"):
        for line in (ROOT / file).read_text(encoding="utf-8").splitlines():
            name, mark, version = line.partition("==")
            if mark:
                found[plain(name)] = version.split()[0]
    return found


def names_in(file: Path) -> set[str]:
    """Return the packages that a list names, in any of pip's formats."""
    lines = file.read_text(encoding="utf-8").splitlines()
    matches = (re.match(r"[A-Za-z0-9][\w.-]*", line) for line in lines)
    return {plain(match.group()) for match in matches if match}


def download(names: Iterable[str], python: str, folder: Path) -> None:
    """Put the wheels of these packages for that version of Python into a folder."""
    tested = versions()
    wanted = [f"{name}=={tested[plain(name)]}" if plain(name) in tested else name for name in names]
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    command += ["--python-version", python, "--implementation", "cp", "--dest", str(folder)]
    for platform in PLATFORMS:
        command += ["--platform", platform]
    subprocess.run([*command, *wanted], check=True)


def build_own(folder: Path, tools: Path) -> None:
    """Put wheels of all packages of this repository into a folder. Installs what builds them into `tools`, once."""
    pip = [sys.executable, "-m", "pip"]
    subprocess.run([*pip, "install", "--quiet", "--target", str(tools), "hatchling"], check=True)
    packages = [ROOT / "core", *sorted(path.parent for path in (ROOT / "plugins").glob("*/pyproject.toml"))]
    command = [*pip, "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", str(folder)]
    subprocess.run([*command, *map(str, packages)], check=True, env={**os.environ, "PYTHONPATH": str(tools)})


def repack(wheel: Path) -> None:
    """Leave out the trimmed files of a wheel, and the compression."""
    own = wheel.name.startswith("spurline")
    with zipfile.ZipFile(wheel) as old:
        files = {name: old.read(name) for name in old.namelist()}
        modes = {info.filename: info.external_attr for info in old.infolist()}
    gone = {name for name in files if not own and any(fnmatchcase(name, pattern) for pattern in TRIMMED)}
    (record,) = (name for name in files if name.endswith(".dist-info/RECORD"))
    lines = files[record].decode().splitlines(keepends=True)
    files[record] = "".join(line for line in lines if line.split(",")[0] not in gone).encode()
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_STORED) as new:
        for name in files.keys() - gone:
            info = zipfile.ZipInfo(name)
            info.external_attr = modes[name]
            new.writestr(info, files[name])


def tracked() -> list[Path]:
    """Return the files of the repository that the archive has, without what git ignores."""
    command = ["git", "-C", str(ROOT), "ls-files", "--cached", "--others", "--exclude-standard", *FILES]
    listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    return [Path(name) for name in listed if (ROOT / name).is_file()]


def pack(out: Path, python: str, have: set[str]) -> list[tuple[str, int]]:
    """Write the archive, and return the sizes of the wheels in it, in bytes, as downloaded."""
    left_out = [name for name in CARRIED if plain(name) in have]
    folder = out.name.split(".")[0]
    with tempfile.TemporaryDirectory() as temporary:
        wheels = Path(temporary) / "wheels"
        wheels.mkdir()
        download([name for name in CARRIED if name not in left_out], python, wheels)
        build_own(wheels, Path(temporary) / "tools")
        sizes = [(wheel.name, wheel.stat().st_size) for wheel in sorted(wheels.glob("*.whl"))]
        texts = {
            "README.md": README.format(
                archive=out.name, folder=folder, python=python, commit=commit(), left_out=", ".join(left_out) or "none"
            ),
            "run.sh": RUN,
            "commit.txt": commit() + "\n",
        }
        for name, text in texts.items():
            (Path(temporary) / name).write_text(text, encoding="utf-8")
        out.parent.mkdir(parents=True, exist_ok=True)
        with tarfile.open(out, "w:xz", preset=PRESET) as archive:
            for name in texts:
                archive.add(Path(temporary) / name, f"{folder}/{name}")
            for file in tracked():
                archive.add(ROOT / file, f"{folder}/{file}")
            for wheel in sorted(wheels.glob("*.whl")):
                repack(wheel)
                archive.add(wheel, f"{folder}/wheels/{wheel.name}")
    return sizes


def main() -> int:
    """Write the archive and print sizes. Return 1 if it is larger than the limit."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", default="3.12", help="version of Python on the machine with the GPU")
    parser.add_argument("--out", type=Path, help="the archive, by default dist/spurline-gpu-pyVERSION.tar.xz")
    parser.add_argument("--have", type=Path, help="file that names packages which that machine has")
    parser.add_argument("--limit-mib", type=float, default=60)
    given = parser.parse_args()
    out = given.out or ROOT / "dist" / f"spurline-gpu-py{given.python.replace('.', '')}.tar.xz"
    sizes = pack(out, given.python, names_in(given.have) if given.have else set())
    for name, size in sorted(sizes, key=lambda pair: -pair[1])[:12]:
        print(f"{size / 2**20:7.2f} MiB  {name}")
    own = sum(size for name, size in sizes if name.startswith("spurline"))
    print(f"{own / 2**20:7.2f} MiB  all wheels of Spurline")
    total = out.stat().st_size / 2**20
    print(f"{total:7.2f} MiB  {out}, of {given.limit_mib:g} MiB at most")
    if total > given.limit_mib:
        print("Too large: name packages that the machine has with --have, or take some out of CARRIED.")
    return int(total > given.limit_mib)


if __name__ == "__main__":
    sys.exit(main())
