"""What every test shares: one CPU thread, no network, a cache of its own, a small hypothesis budget unless soaking."""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["SPURLINE_CACHE"] = tempfile.mkdtemp(prefix="spurline-test-cache-")
atexit.register(shutil.rmtree, os.environ["SPURLINE_CACHE"], ignore_errors=True)

from hypothesis import HealthCheck, settings  # noqa: E402 - transformers reads the environment when a test imports it

# How fast examples are made says something about the machine, not about the test.
settings.register_profile("spurline", deadline=None, print_blob=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("spurline")
