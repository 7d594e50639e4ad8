"""Use an external OpenAI-compatible vLLM server as a member of the pool.

A pause cancels all streams. Later each response continues after the tokens that have arrived. Tokens that were
generated but did not arrive are generated again, so no token gets the wrong version.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import os
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import aiohttp
import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from spurline.errors import ConfigError, DataError, RunFailedError, SpurlineError
from spurline.terminal import tell
from spurline_async_rl.engines.commands import Command, FinishUpdate, Gate
from spurline_async_rl.engines.configs import VllmEngineConfig, server_url
from spurline_async_rl.engines.member import EngineDiedError
from spurline_async_rl.engines.response import Delta, Progress, VllmResponse
from spurline_async_rl.engines.vllm.launch import WORKER_EXTENSION, check_complete, worker_call
from spurline_async_rl.engines.vllm.lease import ServerLease
from spurline_async_rl.engines.vllm.stock import StockWorkers
from spurline_rl.engines.in_process.response import support_row
from spurline_rl.protocols.rollout_engine import GenerationRequest
from spurline_rl.trajectory import FinishReason

_ASK_TIMEOUT_S = 5.0
"""Time limit in seconds for one check of a server while a run waits for its servers, and to end a claim."""
_ASK_AGAIN_S = 2.0
"""Seconds between two checks whether a server answers."""
_KINDS = ("tensor", "pipeline", "data")
_LONGEST_LINE = 1 << 24
"""Limit in bytes for one line of a stream. It is large, because the first event contains the prompt."""
API_KEY = "VLLM_API_KEY"
"""The environment variable with the key of the servers."""
_START = (
    "Start it with VLLM_SERVER_DEV_MODE=1 python -m vllm.entrypoints.openai.api_server --model ... "
    "--logprobs-mode processed_logprobs --scheduling-policy priority"
)
_NO_LOGPROB = -9999.0
"""The logprob that vLLM sends for a token that was cut off."""
_BACKEND = "nccl"
"""The backend of vLLM's weight transfer that weight sync `vllm_native` speaks to."""
_START_HINTS = {
    False: f"{_START} --worker-extension-cls {WORKER_EXTENSION}.",
    True: f"""{_START} --weight-transfer-config '{{"backend": "{_BACKEND}"}}' (vLLM 0.30 or newer).""",
}
"""How to start a server that has our worker extension, or one that is stock."""
_tell_once = cache(tell)
_OPEN = (
    "lets every client pause it and change its weights, because its development endpoints need no key. Allow only the "
    f"machines of this run to reach its port. Or use a proxy that requires the key of {API_KEY} on all paths."
)


class ServedModel(NamedTuple):
    """The model of a server. `is_open` means that the server is on another machine and obeys clients without a key."""

    name: str
    max_model_len: int
    num_workers: int
    weights_dtype: str
    is_open: bool


class ServerApi:
    """The HTTP calls to one server.

    They raise EngineDiedError if the server fails or cannot be reached, and DataError if it refuses a request.
    `is_stock` means that it gets weights by vLLM's own weight transfer, without our worker extension. `workers` calls a
    method of the extension in every worker, or of `StockWorkers`. It raises RunFailedError if the method fails.
    `most_kept` is the largest `support_width` of a request.
    """

    def __init__(self, url: str, connect_timeout_s: float, *, is_stock: bool = False, most_kept: int = 0):
        self.url = server_url(url)
        self._hint = _START_HINTS[is_stock]
        self.workers = StockWorkers(self._ask).call if is_stock else self._call_workers
        self._is_stock = is_stock
        self._most_kept = most_kept
        api_key = os.environ.get(API_KEY)
        self._stranger_limit = aiohttp.ClientTimeout(total=connect_timeout_s)
        self._has_priorities = False
        # A request has no total time limit here, because the callers have their own limits.
        self._session = aiohttp.ClientSession(
            headers={"Authorization": f"Bearer {api_key}"} if api_key else None,
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=connect_timeout_s),
            # A load balancer before stock servers is noticed only if each call may reach another server.
            connector=aiohttp.TCPConnector(limit=0, force_close=is_stock),
            read_bufsize=_LONGEST_LINE,
        )

    async def model(self) -> ServedModel:
        """Return the model of the server. Raises ConfigError if the server was started with wrong options."""
        try:
            first = (await self._call("GET", "/v1/models"))["data"][0]
            config = (await self._call("GET", "/server_info", params={"config_format": "json"}))["vllm_config"]
            model, parallel = config["model_config"], config["parallel_config"]
            mode, extension = model["logprobs_mode"], parallel["worker_extension_cls"]
            most_logprobs = int(model.get("max_logprobs", -1))
            transfer = (config.get("weight_transfer_config") or {}).get("backend")
            self._has_priorities = config.get("scheduler_config", {}).get("policy") == "priority"
            served = ServedModel(
                name=first["id"],
                max_model_len=int(first["max_model_len"]),
                num_workers=math.prod(int(parallel.get(f"{kind}_parallel_size", 1)) for kind in _KINDS),
                weights_dtype=str(model["dtype"]).removeprefix("torch."),
                is_open=not self.is_here and await self._obeys_strangers(),
            )
        except (AttributeError, LookupError, TypeError, ValueError) as error:
            text = f"answers, but not as vLLM does ({type(error).__name__}: {error}). {self._hint}"
            raise self._config_error(text) from error
        if mode != "processed_logprobs":
            raise self._config_error(f"has logprobs mode '{mode}', not processed_logprobs. {self._hint}")
        if 0 <= most_logprobs <= self._most_kept:
            fix = f"Start it with --max-logprobs {self._most_kept + 1} or more, or lower sampling.top_k"
            raise self._config_error(f"returns only {most_logprobs} logprobs of a token. {fix}.")
        if self._is_stock and transfer != _BACKEND:
            raise self._config_error(f"has weight transfer '{transfer}', not {_BACKEND}. {self._hint}")
        if not self._is_stock and extension != WORKER_EXTENSION:
            other = " Or set source.weight_sync: vllm_native." if transfer == _BACKEND else ""
            raise self._config_error(f"has worker extension '{extension}', not {WORKER_EXTENSION}. {self._hint}{other}")
        if config.get("lora_config") is not None:
            raise self._config_error(
                "was started with --enable-lora, but this run sends merged weights to it. Start it without this option."
            )
        return served

    @property
    def is_here(self) -> bool:
        """Return whether the server is reached over the loopback of this machine."""
        return urlsplit(self.url).hostname in ("localhost", "127.0.0.1", "::1")

    async def complete(self, model: str, request: GenerationRequest) -> AsyncGenerator[Delta, None]:
        """Yield the response in parts."""
        sampling = request.sampling
        if request.is_urgent and not self._has_priorities:
            _tell_once(
                f"{self.url} was started without --scheduling-policy priority, so proofs of publishes wait behind its "
                "other requests, and training waits for them. Start it with this option."
            )
        body = {
            "model": model,
            "prompt": request.prompt_ids,
            "max_tokens": sampling.max_new_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            # These override the defaults in the model's folder.
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "seed": request.seed,
            "stop_token_ids": list(sampling.stop_token_ids),
            "ignore_eos": sampling.ignore_eos,
            # vLLM returns the logprobs of these many likeliest tokens besides that of the sampled token.
            "logprobs": sampling.support_width and sampling.support_width + 1,
            "return_tokens_as_token_ids": True,
            "return_token_ids": True,
            "stream": True,
            # Lower numbers begin first. A server without priorities refuses all but 0.
            "priority": -1 if request.is_urgent and self._has_priorities else 0,
        }
        try:
            async with self._session.post(self.url + "/v1/completions", json=body) as answer:
                await self._check(answer)
                async for line in answer.content:
                    text = line.decode().strip()
                    if text.startswith("data:") and not text.endswith("[DONE]"):
                        yield self._delta(json.loads(text.removeprefix("data:")), sampling.support_width)
        except (aiohttp.ClientError, OSError) as error:
            raise self._lost(error) from error

    async def _call_workers(self, method: str, *arguments: Any) -> list[Any]:
        body = {"method": method, "args": list(arguments)}
        return await self._ask("POST", "/collective_rpc", body, "results")

    async def _ask(self, verb: str, path: str, body: Any, key: str) -> Any:
        """Return the value of this key in the answer. Raises RunFailedError if the call fails."""
        answer = await self._call(verb, path, body=body, on_failure=RunFailedError)
        if key not in answer:
            raise RunFailedError(f"{self.url} answered to {path}, but not as vLLM does. {self._hint}")
        return answer[key]

    async def pause(self) -> None:
        """Abort all requests, and drop all cached keys and values."""
        await self._call("POST", "/pause", params={"mode": "abort", "clear_cache": "true"})

    async def resume(self) -> None:
        await self._call("POST", "/resume")

    async def close(self) -> None:
        await self._session.close()

    async def _call(
        self,
        verb: str,
        path: str,
        *,
        body: Any = None,
        params: Mapping[str, str] | None = None,
        on_failure: type[RunFailedError] = EngineDiedError,
    ) -> dict[str, Any]:
        try:
            async with self._session.request(verb, self.url + path, json=body, params=params) as answer:
                if answer.status == 404:
                    raise self._config_error(f"has no endpoint {path}. {self._hint}")
                await self._check(answer, on_failure)
                try:
                    return await answer.json()
                except (aiohttp.ContentTypeError, ValueError):
                    return {}
        except (aiohttp.ClientError, OSError) as error:
            raise self._lost(error) from error

    async def _obeys_strangers(self) -> bool:
        """Return whether the server answers a request without a key. vLLM checks keys only under `/v1`."""
        try:
            async with aiohttp.request(
                # A proxy may redirect to a login page, or not answer at all.
                "GET",
                self.url + "/server_info",
                timeout=self._stranger_limit,
                allow_redirects=False,
            ) as answer:
                return answer.status == 200
        except (aiohttp.ClientError, OSError):
            return False

    async def _check(self, answer: aiohttp.ClientResponse, on_failure: type[RunFailedError] = EngineDiedError) -> None:
        if answer.status < 400:
            return
        text = (await answer.text())[:500]
        if answer.status in (401, 403):
            raise self._config_error(
                f"refuses the API key ({answer.status}). Put the right key into the environment variable {API_KEY}."
            )
        # With 408, 425, 429 and 5xx, the server may accept the request later, or another server may accept it.
        if answer.status < 500 and answer.status not in (408, 425, 429):
            raise DataError(f"{self.url} refuses the request: {answer.status} {text}")
        raise on_failure(f"{self.url} failed: {answer.status} {text}")

    def _delta(self, event: dict[str, Any], support_width: int) -> Delta:
        if "error" in event:
            raise EngineDiedError(f"{self.url} failed: {event['error']}")
        if not event["choices"]:
            return Delta((), ())
        (choice,) = event["choices"]
        reason = choice["finish_reason"]
        if reason not in (None, "stop", "length"):
            raise EngineDiedError(f"{self.url} ended a response with '{reason}'.")
        tokens = choice.get("token_ids") or ()
        logprobs = choice["logprobs"]["token_logprobs"] if tokens else ()
        likeliest = choice["logprobs"]["top_logprobs"] if tokens and support_width else ()
        support = [token for each in likeliest for token in _support_row(each, support_width).tolist()]
        return Delta(tokens, logprobs, reason, support=support)

    def _lost(self, error: BaseException) -> EngineDiedError:
        # Some errors of aiohttp have a more precise `os_error`.
        cause = getattr(error, "os_error", error)
        return EngineDiedError(f"{self.url} cannot be reached: {type(cause).__name__}: {cause}")

    def _config_error(self, text: str) -> ConfigError:
        return ConfigError.at("source.engine.urls", f"names {self.url}, which {text}")


def _support_row(likeliest: Mapping[str, float], width: int) -> NDArray[np.int32]:
    """Return `support_row` of {"token_id:ID": logprob}. vLLM sends -9999 for a logprob of -inf."""
    ids = np.array([int(name.removeprefix("token_id:")) for name in likeliest])
    logprobs = np.array([*likeliest.values()])
    return support_row(ids, np.where(logprobs > _NO_LOGPROB, logprobs, -np.inf), width)


def await_servers(config: VllmEngineConfig, tell: Callable[[str], None], *, is_stock: bool = False) -> None:
    """Wait until all servers answer. Call `tell` once if some do not answer yet.

    Raises:
        ConfigError: If a server does not answer within `start_timeout_s`, or was started with wrong options.
    """

    async def problem_of(url: str) -> str:
        api = ServerApi(url, _ASK_TIMEOUT_S, is_stock=is_stock)
        try:
            async with asyncio.timeout(_ASK_TIMEOUT_S):
                await api.model()
        except TimeoutError:
            return f"{url} gives no answer in {_ASK_TIMEOUT_S:g} s"
        except EngineDiedError as error:
            return str(error)
        finally:
            await api.close()
        return ""

    async def wait() -> None:
        limit = f"within {config.start_timeout_s:g} s (source.engine.start_timeout_s)"
        hint = _START_HINTS[is_stock]
        deadline = time.monotonic() + config.start_timeout_s
        has_told = False
        while problems := "; ".join(filter(None, await asyncio.gather(*map(problem_of, config.urls)))):
            if time.monotonic() >= deadline:
                raise ConfigError.at(
                    "source.engine.urls", f"names servers that did not answer {limit}: {problems}. {hint}"
                )
            if not has_told:
                tell(f"waiting for servers to answer {limit}: {problems}. {hint.rstrip('.')}")
                has_told = True
            await asyncio.sleep(_ASK_AGAIN_S)

    asyncio.run(wait())


class ServerMember:
    """An `EngineMember` for a server, which keeps running after `close`.

    Args:
        make_api: Called on the event loop.
        owner: The name of this run, for other runs that try to use the server.
    """

    def __init__(
        self, name: str, make_api: Callable[[], ServerApi], tokenizer: PreTrainedTokenizerBase, *, owner: str
    ) -> None:
        self.name = name
        self._owner = owner
        self._make_api = make_api
        self._api: ServerApi | None = None
        self.num_workers = 1
        self.weights_dtype: str | None = None
        self._tokenizer = tokenizer
        self._version = 0
        self._streams: set[asyncio.Task[FinishReason | None]] = set()
        self._gate = Gate()

    async def start(self) -> None:
        self._api = self._make_api()
        self._lease = ServerLease(self._api.workers, self._api.url, self._owner)
        self._served = served = await self._api.model()
        self.num_workers, self.weights_dtype = served.num_workers, served.weights_dtype
        if served.is_open:
            tell(f"{self.name} {_OPEN}")
        await self._lease.begin()
        # An earlier run may have left the server paused.
        await self._api.resume()

    async def generate(self, request: GenerationRequest, progress: Progress) -> FinishReason:
        response = VllmResponse(request, progress, self._tokenizer, max_model_len=self._served.max_model_len)
        while True:
            await self._gate.wait()
            await self._lease.until_valid()
            if self._gate.holds:
                continue
            if response.ended is not None:
                return response.ended
            stream = asyncio.create_task(self._stream(request.name, response))
            self._streams.add(stream)
            try:
                await asyncio.wait({stream})
            finally:
                stream.cancel()
                self._streams.discard(stream)
            if not stream.cancelled() and (reason := stream.result()) is not None:
                return reason

    async def control(self, command: Command) -> None:
        if command.begins:
            self._gate.shut(command.hold)
            for stream in self._streams:
                stream.cancel()
            await asyncio.gather(*self._streams, return_exceptions=True)
            # This raises an error if the server belongs to another run, which must not be paused.
            await self._lease.call()
            await self._opened.pause()
        if call := worker_call(command):
            check_complete(await self._lease.call(*call))
        if isinstance(command, FinishUpdate):
            self._version = command.version
        if command.ends:
            if self._gate.holds == {command.hold}:
                await self._lease.call()
                await self._opened.resume()
            self._gate.open(command.hold)

    async def wait_dead(self) -> str:
        return await self._lease.keep()

    async def close(self) -> None:
        api, self._api = self._api, None
        if api is None:
            return
        for stream in self._streams:
            stream.cancel()
        try:
            if self._gate.holds:
                # The server may be gone, or belong to another run.
                with contextlib.suppress(SpurlineError):
                    await self._lease.call()
                    await api.resume()
        finally:
            await api.close()

    @property
    def _opened(self) -> ServerApi:
        if self._api is None:
            raise EngineDiedError(f"{self.name} is closed")
        return self._api

    async def _stream(self, name: str, response: VllmResponse) -> FinishReason | None:
        """Return why the response has ended, or None if this run's claim on the server ran out first."""
        try:
            async with contextlib.aclosing(self._opened.complete(self._served.name, response.rest())) as deltas:
                async for delta in deltas:
                    if not self._lease.is_valid:
                        return None
                    reason = response.add_delta(delta, self._version)
                    if reason is not None:
                        return reason
        except DataError as error:
            raise DataError(f"{name}: {error}") from error
        raise EngineDiedError(f"{self.name} stopped in the middle of a response")


async def end_claims(apis: Sequence[ServerApi], owner: str) -> None:
    """Let other runs use these servers. Servers that do not answer stay claimed for a while."""

    async def end(api: ServerApi) -> None:
        with contextlib.suppress(SpurlineError, TimeoutError):
            async with asyncio.timeout(_ASK_TIMEOUT_S):
                await api.workers("spurline_end_claim", owner)
        await api.close()

    await asyncio.gather(*map(end, apis))
