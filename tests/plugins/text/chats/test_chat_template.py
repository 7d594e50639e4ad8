"""Templates render as with transformers; one that does not compile, or fails, is named."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast
from transformers.utils.chat_template_utils import render_jinja_template

from spurline.config.run_config import ModelConfig
from spurline.errors import ModelError
from spurline_text.chats import chat
from spurline_text.chats.chat import ChatRenderer, ChatTemplate
from spurline_text.rows.rows import BadRowError
from spurline_text.testing.inputs import tiny_tokenizer
from spurline_text.tokenizer import load_tokenizer

BUNDLED = Path(chat.__file__).parent / "templates"
TEMPLATES = {path.stem: path.read_text() for folder in (BUNDLED, Path(__file__).parents[1] / "chat_templates")
             for path in folder.glob("*.jinja")}  # fmt: skip
HELLO: list[Any] = [{"role": "user", "content": "hello"}]


def with_template(make_tokenizer: Callable[..., PreTrainedTokenizerFast], template: str) -> PreTrainedTokenizerFast:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = template
    tokenizer.chat_template_source = "mine.jinja"
    return tokenizer


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{% if %}", "line 1: Expected an expression"),
        ("{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", "RecursionError"),
        ("{% for a in [] %}" * 30 + "{% endfor %}" * 30, "too many statically nested blocks"),
        ("a" * 1_000_000, "1,000,000 characters"),
        ("{{ {}|nothing }}", "No filter named 'nothing'"),
    ],
)
def test_a_template_that_cannot_be_compiled_is_the_models_fault(
    make_tokenizer: Callable[..., PreTrainedTokenizerFast], template: str, reason: str
) -> None:
    with pytest.raises(ModelError, match=reason) as caught:
        ChatRenderer(with_template(make_tokenizer, template)).render(HELLO, None)
    assert "mine.jinja" in str(caught.value)
    assert "`model.chat_template`" in str(caught.value)


@pytest.mark.parametrize(
    "template",
    [
        *("{{ 1 / 0 }}", "{{ range(10**9) }}", "{% include 'x' %}", "{{ a.b.c }}", "{{ messages.append(1) }}"),
        *("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "{{ raise_exception('no') }}"),
    ],
)
def test_an_error_in_a_template_names_the_template(
    make_tokenizer: Callable[..., PreTrainedTokenizerFast], template: str
) -> None:
    with pytest.raises(BadRowError, match=r"refused by the chat template mine\.jinja"):
        ChatRenderer(with_template(make_tokenizer, template)).render(HELLO, None)


TEXT = st.text(st.sampled_from("ab 42.\n<>/|%{}é😀"), max_size=30) | st.just("x" * 500)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=8,
)
CALLS = st.lists(
    st.fixed_dictionaries(
        {"function": st.fixed_dictionaries({"name": TEXT, "arguments": st.dictionaries(TEXT, JSON)})}
    ),
    max_size=2,
)
MESSAGES = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["user", "assistant", "system", "tool"]), "content": TEXT},
        optional={"reasoning_content": TEXT, "thinking": TEXT, "tool_calls": CALLS, "more": JSON},
    ),
    max_size=5,
)
TOOLS = st.none() | st.lists(st.fixed_dictionaries({"type": st.just("function"), "function": JSON}), max_size=2)


def outcome(render: Callable[[], Any]) -> Any:
    try:
        return render()
    except Exception as error:  # noqa: BLE001 - both must raise the same
        return f"{type(error).__name__}: {error}"


@pytest.mark.parametrize("template", TEMPLATES.values(), ids=TEMPLATES)
@given(messages=MESSAGES, tools=TOOLS, prompt=st.booleans())
@settings(max_examples=25, deadline=None)
def test_templates_render_as_with_transformers(template: str, messages: Any, tools: Any, prompt: bool) -> None:
    special = tiny_tokenizer().special_tokens_map
    compiled = ChatTemplate(template, special)
    for shown in (messages, messages[:-1]):
        expected = outcome(
            lambda: render_jinja_template(
                [shown],  # noqa: B023
                tools=tools,
                chat_template=template,
                add_generation_prompt=prompt,
                **special,
            )[0][0]
        )
        assert outcome(lambda: compiled.render(shown, tools, add_generation_prompt=prompt)[0]) == expected  # noqa: B023


@pytest.mark.parametrize(
    "content", ['{"x": ' + "[" * 100_000, "[1]", '{"eos_token": 5}', '{"x": ' + "9" * 10_000 + "}"]
)
def test_tokenizer_files_that_cannot_be_read_name_the_model(tmp_path: Path, content: str) -> None:
    tiny_tokenizer().save_pretrained(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(content)
    with pytest.raises(ModelError, match=r"model.path: no tokenizer can be loaded from folder"):
        load_tokenizer(ModelConfig(path=str(tmp_path)))
