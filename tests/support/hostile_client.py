"""A client of the harness that sends valid, malformed, slow and huge requests, and one that looks how long others wait.

Standard library alone, so that it starts fast in a process of its own: then what it takes to make and send requests
does not count as the server's.
"""

from __future__ import annotations

import asyncio
import http.client
import json
import random
import select
import sys
import time
from collections import Counter
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

LIMIT_S = 120.0
KINDS = {"valid": 50, "malformed": 35, "slow": 12, "huge": 3}
GARBAGE: tuple[Any, ...] = (
    None,
    True,
    -1,
    10**30,
    1e300,
    "",
    "x",
    "\u2028",
    [],
    [[]],
    {},
    {"x": [1]},
    [None],
    "[[",
    "\0",
)
FIELDS = (
    "messages,model,n,stop,stream,stream_options,max_tokens,temperature,top_p,top_k,seed,return_token_ids,tools,"
    "tool_choice,max_completion_tokens,logprobs,top_logprobs,prompt,response_format,presence_penalty,echo"
)
STRANGE_HEADS = (
    b"GET / HTTP/9.9\r\n",
    b"\x16\x03\x01\x02\0",
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    b"HEAD /x HTTP/1.1\r\n",
    b"Content-Length: x\r\n",
    b"Transfer-Encoding: chunked\r\n",
    b"Content-Encoding: gzip\r\n",
    b"Expect: 100-continue\r\n",
    b"Upgrade: websocket\r\nConnection: upgrade\r\n",
    b"Authorization: no\r\n",
)


class HostileClient:
    """Sends requests of one session; `statuses` counts what it was told, by kind. huge: bytes of the largest ones."""

    def __init__(self, base_url: str, key: str, seed: int, huge: int) -> None:
        self._url = urlsplit(base_url)
        self._key = key
        self._random = random.Random(seed)
        self._huge = huge
        self._said: list[dict[str, Any]] = []
        self.statuses: Counter[str] = Counter()

    async def send(self, count: int) -> None:
        """So many requests, up to four at a time."""
        kinds = self._random.choices(list(KINDS), list(KINDS.values()), k=count)
        for start in range(0, count, 4):
            await asyncio.gather(*(getattr(self, kind)(kind) for kind in kinds[start : start + 4]))

    async def valid(self, kind: str) -> None:
        path, body = self._request()
        status, answer = await self._ask(kind, path, json.dumps(body).encode())
        if status == 200 and not body.get("stream") and path == "/chat/completions":
            said = json.loads(answer)["choices"][0]["message"]
            self._said = [*body["messages"], {"role": "assistant", "content": said["content"]}]

    async def malformed(self, kind: str) -> None:
        path, body = self._request()
        way = self._random.randrange(6)
        if way == 0:
            body[self._random.choice(FIELDS.split(","))] = self._random.choice(GARBAGE)
        elif way == 1 and "messages" in body:
            message = self._random.choice(body["messages"])
            message[self._random.choice(["role", "content", "tool_calls", "name", "from", "value"])] = self._garbage()
        elif way == 2:
            depth = self._random.choice([10, 190, 1000, 100_000])
            body[self._random.choice([*FIELDS.split(","), "unknown"])] = None
            raw = json.dumps(body).replace("null", "[" * depth + "]" * depth)
            await self._ask(kind, path, raw.encode())
            return
        raw = json.dumps(body).encode(self._random.choice(["utf-8"] * 5 + ["utf-16", "utf-32"]))
        if way == 3:
            place = self._random.randrange(len(raw))
            raw = raw[:place] + self._random.randbytes(self._random.randrange(4)) + raw[place + 1 :]
        elif way == 4:
            raw = raw.replace(
                b"user", self._random.choice([b"\\ud800", b"\xed\xa0\x80", b"\xff", b"\\", b'"', b"\\u0000"])
            )
        elif way == 5:
            head = self._random.choice(STRANGE_HEADS)
            whole = self._head(path, len(raw))
            place = whole.index(b"\r\n") + 2 if b":" in head else 0
            await self._exchange(kind, whole[:place] + head + whole[place:], raw, limit_s=2.0)
            return
        await self._ask(kind, path, raw)

    async def slow(self, kind: str) -> None:
        """Comes piece by piece, and perhaps hangs up on the way."""
        path, body = self._request()
        raw = self._head(path, 0) + json.dumps(body).encode()
        raw = raw.replace(b"Content-Length: 0", b"Content-Length: %d" % (len(raw) - raw.index(b"\r\n\r\n") - 4))
        end = len(raw) if self._random.random() < 0.5 else self._random.randrange(len(raw))
        reader, writer = await asyncio.open_connection(self._url.hostname, self._url.port)
        with suppress(ConnectionError):
            for start in range(0, end, 400):
                writer.write(raw[start : min(end, start + 400)])
                await writer.drain()
                await asyncio.sleep(0.001)
            if end == len(raw) and self._random.random() < 0.8:
                await self._take(kind, reader)
            else:
                self.statuses[f"{kind} hung up"] += 1
        writer.close()

    async def huge(self, kind: str) -> None:
        size = self._random.randrange(self._huge // 8, self._huge)
        text = self._random.choice(["x", "long words ", "\n", "\u00e9", "[,", " "])
        text *= size // len(json.dumps(text)[1:-1])
        path, body = self._random.choice(
            (
                ("/chat/completions", {"messages": [{"role": "user", "content": text}]}),
                ("/chat/completions", {"messages": [{"role": "user", "content": "x"}] * (size // 40)}),
                ("/chat/completions", {"messages": [{"role": text, "content": "x"}]}),
                ("/chat/completions", {"messages": [{"role": "user", "content": "x", "name": text}]}),
                ("/chat/completions", {"messages": self._said or [{"role": "user", "content": "x"}], "unknown": text}),
                ("/chat/completions", {"messages": [{"role": "user", "content": "x"}], "model": text}),
                ("/completions", {"prompt": text}),
                ("/completions", {"prompt": ["some words"] * (size // 14)}),
                ("/completions", {"prompt": [7] * (size // 3)}),
                ("/completions", {"prompt": [[]] * (size // 4)}),
                ("/completions", {"prompt": {str(number): 0 for number in range(size // 14)}}),
            )
        )
        await self._ask(kind, path, json.dumps(body).encode())

    def _request(self) -> tuple[str, dict[str, Any]]:
        random = self._random
        body: dict[str, Any] = {"n": random.choice([1, 1, 2]), "max_tokens": random.choice([1, 8])}
        if random.random() < 0.2:
            body["stream"] = True
        if random.random() < 0.3:
            return "/completions", {**body, "prompt": random.choice(["go on", ["a", "b"], [5, 6, 7]])}
        body["logprobs"] = random.random() < 0.2
        before = self._said if random.random() < 0.5 and len(self._said) < 12 else []
        return "/chat/completions", {
            **body,
            "messages": [*before, {"role": "user", "content": "tell " * random.randrange(1, 50)}],
        }

    def _garbage(self) -> Any:
        return self._random.choice(GARBAGE)

    def _head(self, path: str, length: int) -> bytes:
        lines = (f"POST {self._url.path}{path} HTTP/1.1", "Host: x", f"Authorization: Bearer {self._key}")
        return "\r\n".join((*lines, "Connection: close", f"Content-Length: {length}", "", "")).encode()

    async def _ask(self, kind: str, path: str, raw: bytes) -> tuple[int, bytes]:
        return await self._exchange(kind, self._head(path, len(raw)), raw, limit_s=LIMIT_S)

    async def _exchange(self, kind: str, head: bytes, raw: bytes, *, limit_s: float) -> tuple[int, bytes]:
        reader, writer = await asyncio.open_connection(self._url.hostname, self._url.port)
        try:
            writer.write(head + raw)
            async with asyncio.timeout(limit_s):
                return await self._take(kind, reader)
        except TimeoutError:
            self.statuses[f"{kind} waits for more"] += 1
            assert limit_s < LIMIT_S, "no answer"
            return 0, b""
        finally:
            writer.close()

    async def _take(self, kind: str, reader: asyncio.StreamReader) -> tuple[int, bytes]:
        try:
            whole = await reader.read()
        except ConnectionError:
            whole = b""
        status = int(whole.split()[1]) if whole else 0
        self.statuses[f"{kind} {status}"] += 1
        return status, whole.partition(b"\r\n\r\n")[2]


def watch(base_url: str, key: str) -> None:
    """Ask for the models again and again until standard input says enough; prints the seconds that each took."""
    url = urlsplit(base_url)
    connection = http.client.HTTPConnection(str(url.hostname), url.port, timeout=LIMIT_S)
    seconds: list[float] = []
    while not select.select([sys.stdin], [], [], 0.005)[0]:
        begin = time.perf_counter()
        connection.request("GET", f"{url.path}/models", headers={"Authorization": f"Bearer {key}"})
        connection.getresponse().read()
        seconds.append(round(time.perf_counter() - begin, 4))
    print(json.dumps(seconds), flush=True)


async def attack() -> None:
    """Serve lines of standard input, each the arguments of a client and a number of requests, one by one."""
    for line in sys.stdin:
        *arguments, count = json.loads(line)
        client = HostileClient(*arguments)
        await client.send(count)
        print(json.dumps(client.statuses), flush=True)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        watch(*sys.argv[1:])
    else:
        asyncio.run(attack())
