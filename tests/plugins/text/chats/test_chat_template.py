"""Templates render as with transformers; one that does not compile, or fails, is named."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast
from transformers.utils.chat_template_utils import render_jinja_template

from spurline.config.run_config import ModelConfig
from spurline.errors import ModelError
from spurline_text.chats import chat_template
from spurline_text.chats.chat import ChatRenderer
from spurline_text.chats.chat_template import ChatTemplate
from spurline_text.rows.rows import BadRowError
from spurline_text.testing.inputs import tiny_tokenizer
from spurline_text.tokenizer import load_tokenizer

BUNDLED = Path(chat_template.__file__).parent / "templates"
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
def test_whatever_a_template_raises_names_the_template(
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
USES = """
{{ messages|length }}{{ messages|map(attribute='content')|join(', ')|upper }}{{ messages[::-1][:2] }}
{{ messages|selectattr('role', 'equalto', 'user')|map(attribute='content')|list|tojson(indent=2) }}
{{ messages|rejectattr('more', 'defined')|list|length }}{{ messages|groupby('role')|list|length }}
{%- for m in messages if m.role != 'system' and m.content is string %}
    {{ loop.index0 % 2 }}{{ loop.cycle('a', 'b') }}{{ loop.changed(m.role) }}
    {{ '%s: %-5s|%.3f' % (m.role, m.content, 1.5) }}
    {{ '{0:>8} {r}'.format(m.content, r=m.role) }}{{ m.content|indent(2)|trim|replace('a', 'bb') }}{{ m.get('more') }}
    {{ m.content.split('4')[0].strip('\\n').lstrip() ~ m.content.rsplit(' ', 1)|last }}{{ m.content|center(20) }}
    {{ m.content|truncate(5)|title|string|e }}{{ m['content'].partition('.')|join('-') }}{{ 'a' in m.content }}
    {{ m.items()|list|length }}{{ m|dictsort|first }}{{ m.keys()|sort|unique|join }}
    {{ m.content|list|batch(2, '-')|list }}
    {{ m.content|list|batch(linecount=3)|list }}{{ 'abcd'|slice(slices=2, fill_with='-')|list }}{{ 'ab'|join(d='-') }}
    {{ m.content|replace(old='a', new='b', count=1)|indent(width=3, first=true)|center(width=9) }}
    {{ 1.25|round(precision=1, method='floor') }}{{ [1]|sum(start=2) }}{{ '5'|int(default=1, base=8) }}
    {{ m.content.startswith(('a', 'b')) }}{{ m.content.center(9, '*') }}{{ m.content|wordcount }}
    {{ m.values()|list|length }}
    {%- if false %}{% continue %}{% endif %}
{% endfor %}
{% set ns = namespace(n=0, all=[], text='') %}
{%- for m in messages %}{% set ns.n = ns.n + m.content|length * 2 - 1 %}
{%- set ns.all = ns.all + [m.role] %}{% endfor %}
{{ ns.n // 2 }}{{ ns.n / 3 }}{{ 2 ** 5 }}{{ -ns.n|abs }}{{ ns.all }}{{ 'x' * 3 }}{{ [1] * 2 + [3] }}
{{ 3.14159|round(2) }}
{{ dict(a=1, **{'b': 2})|tojson }}{{ [1, 2, 3]|sum }}{{ [3, 1]|min }}{{ [3, 1]|max }}{{ '12'|int + '1.5'|float }}
{% macro say(x, y='?') %}<{{ x }}{{ y }}{{ caller() if caller else '' }}>{% endmacro %}{{ say('a') }}
{{ say('a', y='b') }}
{% call say('c') %}inner{% endcall %}{% set block %}{{ say('d') }}{% endset %}{{ block }}
{% filter upper %}low{% endfilter %}
{%- for x in [1, [2, [3]]] recursive %}{{ loop(x) if x is iterable else x }}{% endfor %}
{{ tools|tojson if tools }}{{ undefined_name|default('none') }}{{ bos_token }}{{ strftime_now('%Y') }}
{{ [] is sequence }}
{% with a = 1 %}{{ a }}{% endwith %}{% set c = cycler('a', 'b') %}{{ c.next() }}{{ c.next() }}
{{ {'a': {'b': 1}}.a['b'] }}
{{ messages|map('length')|list }}{{ 'a' if messages }}{{ messages[0].content == messages[-1].content if messages }}
"""


def outcome(render: Callable[[], Any]) -> Any:
    try:
        return render()
    except Exception as error:  # noqa: BLE001 - whatever transformers raises, so does this
        return f"{type(error).__name__}: {error}"


@pytest.mark.parametrize("template", [*TEMPLATES.values(), USES], ids=[*TEMPLATES, "uses"])
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


def test_every_use_renders() -> None:
    text, _ = ChatTemplate(USES, {}).render([*HELLO, {"role": "assistant", "content": "4. a\nb"}], None)
    assert str(datetime.now().year) in text


def test_spans_of_generation_blocks_are_those_of_transformers() -> None:
    messages: list[Any] = [*HELLO, {"role": "assistant", "content": "one"}] * 3
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = TEMPLATES["generation"]
    text, spans = ChatTemplate(tokenizer.chat_template, tokenizer.special_tokens_map).render(
        messages, None, track_generation=True
    )
    expected = tokenizer.apply_chat_template(messages, return_assistant_tokens_mask=True, return_dict=True)
    # One token is one byte, except for special ones.
    trained = [token for token, mask in zip(expected["input_ids"], expected["assistant_masks"], strict=True) if mask]
    assert tokenizer.decode(trained) == "".join(text[start:stop] for start, stop in spans)


@pytest.mark.parametrize(
    "content", ['{"x": ' + "[" * 100_000, "[1]", '{"eos_token": 5}', '{"x": ' + "9" * 10_000 + "}"]
)
def test_tokenizer_files_that_cannot_be_read_name_the_model(tmp_path: Path, content: str) -> None:
    tiny_tokenizer().save_pretrained(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(content)
    with pytest.raises(ModelError, match=r"model.path: no tokenizer can be loaded from folder"):
        load_tokenizer(ModelConfig(path=str(tmp_path)))
