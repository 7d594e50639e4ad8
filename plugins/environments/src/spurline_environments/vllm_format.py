"""Tool format `vllm`: read turns with vLLM's own parsers, for families that this package does not know.

vLLM must be installed where the run is. It returns a turn with a malformed call as content, so such calls are not
counted.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from spurline.errors import ConfigError, listing
from spurline_environments.configs import VllmFormatConfig
from spurline_environments.grammars import ParsedTurn, Schemas, read_call

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_KEY = "source.environment.tool_format"


class VllmFormat:
    """Reads calls with `vllm.tool_parsers`, and reasoning with `vllm.reasoning`."""

    def __init__(self, config: VllmFormatConfig, tokenizer: PreTrainedTokenizerBase) -> None:
        try:
            from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
            from vllm.reasoning import ReasoningParserManager
            from vllm.tool_parsers import ToolParserManager
        except ImportError as error:
            raise ConfigError.at(
                _KEY,
                f"is 'vllm', but vLLM's parsers cannot be imported: {error}. Install vllm, or choose another format.",
            ) from error
        self._tokenizer = tokenizer
        self._request: Any = ChatCompletionRequest
        self._parser = _found(ToolParserManager.get_tool_parser, ToolParserManager, "parser", config.parser)
        self._reasoning: Any = None
        if config.reasoning is not None:
            get = ReasoningParserManager.get_reasoning_parser
            self._reasoning = _found(get, ReasoningParserManager, "reasoning", config.reasoning)(tokenizer)

    def parse(self, text: str, tools: Schemas = ()) -> ParsedTurn:
        # These classes belong to vLLM, and have no types where it is not installed.
        request: Any = self._request(model="", messages=[], tools=[*tools] or None)
        reasoning, rest = (None, text) if self._reasoning is None else self._reasoning.extract_reasoning(text, request)
        found = self._parser(self._tokenizer, request.tools).extract_tool_calls(rest or "", request)
        calls = tuple(read_call(call.function.name, call.function.arguments, call.id) for call in found.tool_calls)
        return ParsedTurn(found.content or "", reasoning, calls)


def _found(get: Any, manager: Any, key: str, name: str) -> Any:
    try:
        return get(name)
    except KeyError as error:
        known = listing(sorted(manager.list_registered()))
        raise ConfigError.at(f"{_KEY}.{key}", f"is '{name}', which vLLM does not have. It has {known}.") from error
