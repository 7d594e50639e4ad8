"""Nothing can run what a file or a message says: no pickle, `eval` or loader of objects, but those listed."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCES = [
    path
    for package in ("core/src", "plugins/*/src", "examples")
    for path in sorted(ROOT.glob(f"{package}/**/*.py"))
    # The kits for plugin authors read what they have written themselves.
    if "testing" not in path.parts
]

UNSAFE = {
    "eval",
    "exec",
    "compile",
    "pickle.load",
    "pickle.loads",
    "pickle.Unpickler",
    "cloudpickle.load",
    "cloudpickle.loads",
    "dill.load",
    "dill.loads",
    "joblib.load",
    "marshal.load",
    "marshal.loads",
    "numpy.load",
    "np.load",
    "pandas.read_pickle",
    "shelve.open",
    "torch.load",
    "yaml.load",
    "yaml.load_all",
    "yaml.full_load",
    "yaml.unsafe_load",
    "AutoModel.from_pretrained",
    "AutoModelForCausalLM.from_pretrained",
    "PeftModel.from_pretrained",
}
"""Calls that make objects, or programs, of bytes; and those that open whatever weights a folder has."""

ALLOWED = {
    ("plugins/ranks/src/spurline_ranks/outcomes.py", "pickle.loads"): "what this process has pickled a line before",
    (
        "plugins/concurrency/src/spurline_concurrency/worker_processes.py",
        "pickle.loads",
    ): "rows of the run, which its own process sends to its child",
    (
        "plugins/collation_fast/src/spurline_collation_fast/tokenization/blocks.py",
        "pickle.loads",
    ): "bytes that the parent process has sent",
}


def unsafe_calls(source: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call):
            continue
        name = ast.unparse(node.func)
        options = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
        safe = options.get("weights_only") == "True" or (name == "yaml.load" and "Safe" in options.get("Loader", ""))
        if (name in UNSAFE and not safe) or options.get("allow_pickle") == "True":
            yield name


def test_nothing_runs_what_it_reads() -> None:
    found = {
        (str(path.relative_to(ROOT)), name)
        for path in SOURCES
        for name in unsafe_calls(path.read_text(encoding="utf-8"))
    }
    assert len(SOURCES) > 300
    assert found - ALLOWED.keys() == set(), "is it safe with files of others? If so, list it with the reason"
    assert ALLOWED.keys() - found == set(), "no longer there"
