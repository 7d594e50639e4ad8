"""What every test shares: one CPU thread, no network, a small hypothesis budget unless a soak is asked for."""

from __future__ import annotations

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("OMP_NUM_THREADS", "1")

from hypothesis import settings

settings.register_profile("spurline", deadline=None, print_blob=True)
settings.load_profile("spurline")
