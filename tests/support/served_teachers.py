"""A server of a teacher that speaks as vLLM's: /v1/models, /tokenize, and /v1/completions with prompt_logprobs.

It runs as a process of its own (`python -m served_teachers FOLDER PORT [OPTION]`), so that it can be killed. Its
model knows only the token before: it needs neither torch nor transformers, and starts at once. With LIE, each second
answer is for other tokens than those that were sent. With NO_TOKENS or NO_LOGPROBS, it does not offer these.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from aiohttp import web
from numpy.typing import NDArray

VOCABULARY = 300


def logprobs_after(tokens: Any) -> NDArray[np.float64]:
    """Return the logprobs [N, VOCABULARY] of all tokens after each of these tokens [N]."""
    logits = np.random.default_rng(0).standard_normal((VOCABULARY, VOCABULARY))[tokens] * 2
    return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


def prompt_logprobs(ids: list[int], top: int) -> list[dict[str, Any] | None]:
    entries: list[dict[str, Any] | None] = [None]
    for row, token in zip(logprobs_after(ids[:-1]), ids[1:], strict=True):
        likeliest = np.argsort(-row)[:top].tolist()
        entries.append({str(each): {"logprob": float(row[each])} for each in dict.fromkeys([token, *likeliest])})
    return entries


def app_of(folder: str, option: str) -> web.Application:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(f"{folder}/tokenizer.json")
    asked: Counter[str] = Counter()

    async def complete(request: web.Request) -> web.Response:
        body = await request.json()
        prompts = body["prompt"]
        # The answer to the request of a single prompt, with which the teacher checks the server, is not counted.
        asked["requests"] += len(prompts) > 1
        if option == "LIE" and len(prompts) > 1 and asked["requests"] % 2:
            prompts = [[(token + 1) % VOCABULARY for token in prompt] for prompt in prompts]
        found = [prompt_logprobs(prompt, body["prompt_logprobs"]) for prompt in prompts]
        choices = [{"index": number, "prompt_logprobs": entries} for number, entries in enumerate(found)]
        if option == "NO_LOGPROBS":
            choices = [{"index": number} for number in range(len(found))]
        # The order of choices is not promised.
        return web.json_response({"choices": choices[::-1]})

    async def tokenize(request: web.Request) -> web.Response:
        body = await request.json()
        return web.json_response({"tokens": tokenizer.encode(body["prompt"], add_special_tokens=False).ids})

    async def models(_: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "teacher"}]})

    app = web.Application(client_max_size=2**26)
    app.add_routes([web.post("/v1/completions", complete), web.get("/v1/models", models)])
    if option != "NO_TOKENS":
        app.add_routes([web.post("/tokenize", tokenize)])
    return app


class Server:
    """A teacher's process, which can be killed and started again at the same address."""

    def __init__(self, folder: Path, *options: str) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self._port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{self._port}"
        self._command = [sys.executable, "-m", "served_teachers", str(folder), str(self._port), *options]
        self.start()

    def start(self) -> None:
        path = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
        self._process = subprocess.Popen(self._command, env={**os.environ, "PYTHONPATH": path})

    def wait(self) -> None:
        for _ in range(600):
            try:
                urllib.request.urlopen(f"{self.url}/v1/models", timeout=5).close()
            except OSError:
                time.sleep(0.05)
            else:
                return
        raise AssertionError("the server of the teacher did not start")

    def kill(self) -> None:
        self._process.send_signal(signal.SIGKILL)
        self._process.wait()


@contextmanager
def served(folder: Path, *options: str) -> Iterator[Server]:
    server = Server(folder, *options)
    try:
        server.wait()
        yield server
    finally:
        server.kill()


if __name__ == "__main__":
    folder, port, *option = sys.argv[1:]
    web.run_app(app_of(folder, "".join(option)), host="127.0.0.1", port=int(port), print=None)
