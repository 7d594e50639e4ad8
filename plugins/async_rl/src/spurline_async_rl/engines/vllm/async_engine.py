"""Run one AsyncLLM of vLLM: carry out the commands of a pool with it, and yield tokens in chunks."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Awaitable
from functools import partial
from typing import Any, TypeVar

from spurline.errors import DataError, RunFailedError
from spurline_async_rl.engines.commands import UPDATE, Command, Sleep, Wake
from spurline_async_rl.engines.member import EngineDiedError
from spurline_async_rl.engines.response import Delta
from spurline_async_rl.engines.vllm.adapters import adapter_request
from spurline_async_rl.engines.vllm.launch import (
    EngineProcesses,
    EngineSpec,
    EngineStart,
    check_complete,
    end_of,
    worker_call,
)
from spurline_concurrency.calls import in_thread
from spurline_rl.protocols.rollout_engine import GenerationRequest

_Result = TypeVar("_Result")


class AsyncEngine:
    """A vLLM engine on this machine. `start` sets the attributes that are declared here."""

    max_model_len: int
    vocabulary: int
    weights_dtype: str
    processes: EngineProcesses

    def __init__(self, spec: EngineSpec):
        self._spec = spec
        self.num_workers = spec.config.tensor_parallel_size
        self.keeps_kv_cache = spec.config.kv_cache == "keep"
        self._holds: set[str] = set()
        self._llm: Any = None
        self._starting: EngineStart | None = None

    @property
    def where(self) -> str:
        return str(self.processes)

    async def start(self) -> None:
        """Start the engine. If this fails, raises EngineDiedError with vLLM's own message."""
        # A start takes a minute, so it runs on a thread.
        self._starting = EngineStart(self._spec)
        self._llm = await in_thread(self._starting.run)
        core = self._llm.engine_core
        self.processes = EngineProcesses([process.pid for process in core.resources.engine_manager.processes])
        self.max_model_len = self._llm.model_config.max_model_len
        self.vocabulary = self._llm.model_config.get_vocab_size()
        self.weights_dtype = str(self._llm.model_config.dtype).removeprefix("torch.")
        self._listen()

    async def generate(
        self, request_id: str, request: GenerationRequest, salt: str, *, each_step: bool = False
    ) -> AsyncGenerator[Delta, None]:
        """Yield the response in parts of `chunk_tokens` tokens, or fewer if a second has passed or a command comes.

        Closing the generator aborts the request. If the task is cancelled or the engine dies, the generator first
        yields all tokens that have come. Stop texts do not end the response. Requests with the same `salt` share
        cached prompts. If `each_step`, every token is yielded immediately.
        """
        from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

        asked = {"prompt_token_ids": list(request.prompt_ids), "cache_salt": salt}
        adapter = None if self._spec.adapter is None else adapter_request()
        # vLLM begins requests with lower numbers first.
        priority = -1 if request.is_urgent else 0
        outputs = self._llm.generate(
            asked, _sampling_params(request, self.vocabulary), request_id, lora_request=adapter, priority=priority
        )
        stream = self._streams.open(request_id, request.sampling.support_width, each_step=each_step)
        try:
            async with contextlib.aclosing(outputs):
                async for output in outputs:
                    reason = output.outputs[0].finish_reason
                    if reason in (None, "stop", "length"):
                        yield stream.take(reason)
                    else:
                        yield stream.take()
                        raise EngineDiedError(f"vLLM ended a response with '{reason}'.")
        except asyncio.CancelledError:
            yield stream.take()
            raise
        except (EngineDeadError, EngineGenerateError) as error:
            yield stream.take()
            raise self._died(f"failed: {error}") from error
        except ValueError as error:
            raise DataError(f"vLLM refuses the request: {error}") from error
        finally:
            self._streams.close(request_id)

    async def control(self, command: Command) -> None:
        """Carry out the command. Raises RunFailedError if a worker cannot do so or weights are missing."""
        if command.begins:
            self._holds.add(command.hold)
            outdates = command.hold == UPDATE and not self.keeps_kv_cache
            await self._stand_still(clear_cache=outdates or isinstance(command, Sleep))
        if isinstance(command, Sleep):
            # Level 1 moves the weights to the host's memory; level 2 drops them. Mode `keep` keeps unfinished requests.
            await self._do(self._llm.sleep(level=1 if command.keep_weights else 2, mode="keep"), str(command))
        elif isinstance(command, Wake):
            await self._do(self._llm.wake_up(["kv_cache" if command.part == "cache" else "weights"]), str(command))
        if call := worker_call(command):
            check_complete(await self._call(*call))
        if command.ends:
            self._holds.discard(command.hold)
            if not self._holds:
                await self._answer_of(self._llm.resume_generation())
            elif isinstance(command, Wake):
                # After the wake-up, vLLM generates again by itself, but another hold has not ended.
                await self._stand_still(clear_cache=False)

    async def wait_ended(self) -> str:
        """Wait until the engine has ended, and return the reason."""
        return f"{await self.processes.wait_ended()}{end_of(self._spec.log)}"

    async def close(self) -> None:
        """End the engine's processes. If this call is cancelled, kill them."""
        from vllm.v1.engine.exceptions import EngineDeadError

        if self._starting is not None:
            self._starting.give_up()
        if self._llm is None:
            return
        llm, self._llm = self._llm, None
        # vLLM's shutdown would stop the output handler last. Until then, the handler might print a traceback.
        if llm.output_handler is not None:
            llm.output_handler.cancel()
        # Requests that wait for tokens must end.
        llm.output_processor.propagate_error(EngineDeadError())
        try:
            # vLLM's default timeout is 5 s. Then it kills the processes, which would leave shared memory behind.
            await in_thread(partial(llm.shutdown, timeout=self._spec.config.close_timeout_s))
        finally:
            self.processes.kill()
            # `__del__` would call `shutdown` again, perhaps while the interpreter shuts down.
            llm.shutdown = lambda timeout=None: None

    def _listen(self) -> None:
        from spurline_async_rl.engines.vllm.step_outputs import TokenStreams

        config = self._spec.config
        # A token must not wait for its chunk so long that the engine seems to make no progress.
        self._streams = TokenStreams(self._llm, config.chunk_tokens, min(1.0, config.generate_timeout_s / 4))

    async def _stand_still(self, *, clear_cache: bool) -> None:
        """Stop generation between two tokens, and return when all earlier tokens have been received.

        If `clear_cache`, unfinished requests compute their keys and values again later.
        """
        await self._answer_of(self._llm.pause_generation(mode="keep", clear_cache=clear_cache))
        # vLLM's answer may come before the last tokens.
        await self._answer_of(self._streams.drained())

    async def _call(self, method: str, *arguments: Any) -> list[Any]:
        return await self._do(self._llm.collective_rpc(method, args=arguments), f"call {method}")

    async def _do(self, call: Awaitable[_Result], what: str) -> _Result:
        """Return vLLM's answer. Raises EngineDiedError if the engine has died, and RunFailedError for other errors."""
        from vllm.v1.engine.exceptions import EngineDeadError

        try:
            return await self._answer_of(call)
        except EngineDiedError:
            raise
        except EngineDeadError as error:
            raise self._died(f"died when it had to {what}: {error}") from error
        except Exception as error:
            raise RunFailedError(f"vLLM could not {what}: {error}") from error

    def _died(self, how: str) -> EngineDiedError:
        return EngineDiedError(f"{self.where} {how}{end_of(self._spec.log)}")

    async def _answer_of(self, call: Awaitable[_Result]) -> _Result:
        """Return the answer of a call. Raises EngineDiedError if the engine dies, since then vLLM never answers."""
        answer = asyncio.ensure_future(call)
        dead = asyncio.ensure_future(self.processes.wait_ended())
        try:
            await asyncio.wait({answer, dead}, return_when=asyncio.FIRST_COMPLETED)
            if not answer.done():
                raise self._died("ended during a command")
            return answer.result()
        finally:
            for task in (answer, dead):
                task.cancel()


def _sampling_params(request: GenerationRequest, vocabulary: int) -> Any:
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    sampling = request.sampling
    return SamplingParams(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        max_tokens=sampling.max_new_tokens,
        stop_token_ids=list(sampling.stop_token_ids),
        ignore_eos=sampling.ignore_eos,
        seed=request.seed,
        # vLLM returns the logprobs of these many likeliest tokens besides that of the sampled token.
        logprobs=min(sampling.support_width + 1, vocabulary) if sampling.support_width else 0,
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
    )
