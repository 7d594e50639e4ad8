"""Files for a vLLM server without our worker extension: the weights of one update as a folder that it loads by itself.

Place on the way: the files of transport `disk`, one per bucket -> second names of them in a folder beside them, as the
transport removes its own when a bucket has been taken -> vLLM's `reload_weights`.
"""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

from spurline.errors import RunFailedError
from spurline.files import remove
from spurline_async_rl.weights.disk import DiskSync, checked_file
from spurline_models.weight_buckets import WeightBucket

_HEAD, _EXPERTS = "lm_head.weight", ".experts."


class ServerFiles:
    """The folder of one server, which holds the whole model at the end of an update.

    server: tells the folders of servers apart. on_cpu: whether the server computes on CPUs.
    """

    def __init__(self, server: str, *, on_cpu: bool) -> None:
        self._folder_name = "spurline-server-" + re.sub(r"[^\w.-]+", "-", server)
        self._on_cpu = on_cpu
        self._folder: Path | None = None
        self._names: set[str] = set()

    def add(self, bucket: WeightBucket) -> None:
        """Keep the file of this bucket. Raises RunFailedError if the server could not load it."""
        if bucket.transport != DiskSync.transport:
            raise RunFailedError(
                f"The server runs without Spurline's worker extension, so it reads weights from files alone, and these "
                f"come by {bucket.transport}. Set source.weight_sync: disk, or start the server with the extension."
            )
        path = checked_file(bucket)
        names = {place.name for place in bucket.places}
        if self._on_cpu and any(_EXPERTS in name for name in names):
            raise RunFailedError(_stale("the experts of a mixture"))
        folder = path.parent / self._folder_name
        try:
            if self._folder is None:
                # What a killed run left there would be loaded too.
                remove(folder)
                folder.mkdir()
                self._folder = folder
            os.link(path, folder / f"model-{len(list(folder.iterdir())) + 1:05d}.safetensors")
        except OSError as error:
            raise RunFailedError(
                f"{folder}: the weights cannot be kept for the server: {error}. A server without Spurline's worker "
                "extension needs a source.weight_sync.folder on a file system with hard links."
            ) from error
        self._names |= names

    def model(self) -> Path:
        """Return the folder with the model. Raises RunFailedError if the server would not take over all weights."""
        if self._on_cpu and _HEAD not in self._names:
            raise RunFailedError(_stale("an output layer that is tied to the embeddings"))
        if self._folder is None:
            raise RunFailedError("An update brought no weights.")
        return self._folder

    def clear(self) -> None:
        """Remove the folder. May be called again."""
        folder, self._folder = self._folder, None
        self._names = set()
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)


def _stale(what: str) -> str:
    return (
        f"A vLLM server on CPUs keeps a packed copy of {what}, which its own reload of weights leaves as it was: its "
        "tokens would come from weights of two versions. Start it with Spurline's worker extension, which renews it."
    )
