"""Chat templates that loop without end or write without measure are refused; all others render as with transformers."""

from __future__ import annotations

import resource
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
from spurline_text.chats.chat_template import ChatTemplate, PlainChat
from spurline_text.chats.metered_jinja import compile_template
from spurline_text.chats.template_budget import TemplateTooCostlyError
from spurline_text.rows.rows import BadRowError
from spurline_text.testing.inputs import tiny_tokenizer
from spurline_text.tokenizer import load_tokenizer

BUNDLED = Path(chat_template.__file__).parent / "templates"
TEMPLATES = {path.stem: path.read_text() for folder in (BUNDLED, Path(__file__).parents[1] / "chat_templates")
             for path in folder.glob("*.jinja")}  # fmt: skip
HELLO: list[Any] = [{"role": "user", "content": "hello"}]
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
NESTED = (
    "{% set n = namespace(a=[0], b=[0]) %}{% for i in range(40) %}{% set n.a = [n.a, n.a] %}{% set n.b = [n.b, n.b] %}"
)
NESTED += "{% endfor %}"
LONG = "{% set x = 'a' * 1000000 %}"

# Minutes and gigabytes without bounds.
pytestmark = pytest.mark.timeout(60)


def render(template: str, messages: list[Any], *, track_generation: bool = False) -> tuple[str, list[tuple[int, int]]]:
    return ChatTemplate(template, SPECIAL).render(PlainChat.of(messages, None), track_generation=track_generation)


@pytest.fixture(autouse=True)
def _few_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hundredth of the steps refuses the same templates in a hundredth of the time."""
    monkeypatch.setattr(chat_template, "_STEPS", 200_000)


@pytest.mark.parametrize(
    "template",
    [
        # Without end.
        "{% for a in range(100000) %}{% for b in range(100000) %}{% endfor %}{% endfor %}",
        "{% for a in range(1000) %}{% for b in range(100000) if false %}{% endfor %}{% endfor %}",
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
        "{% for a in range(100000) %}{{ range(100000)|select('none')|first }}{% endfor %}",
        "{% for a in range(100000) %}{% generation %}x{% endgeneration %}{% endfor %}",
        # One text that doubles.
        "{% set n = namespace(x='a') %}{% for i in range(99) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
        "{% set n = namespace(x='a') %}{% for i in range(99) %}{% set n.x = n.x + n.x %}{% endfor %}",
        "{% set n = namespace(x='a') %}{% for i in range(99) %}{% set x %}{{ n.x }}{{ n.x }}{% endset %}"
        "{% set n.x = x %}{% endfor %}",
        "{% macro f(n) %}{% if n %}{% set x = f(n - 1) %}{{ x }}{{ x }}{% else %}a{% endif %}{% endmacro %}{{ f(60) }}",
        # What is made is larger than what it is made of.
        "{{ 'a' * 10**10 }}",
        "{{ [1] * 10**10 }}",
        "{{ 'a'|center(10**10) }}",
        "{{ 'a'.ljust(10**10) }}",
        "{% set f = 'a'.zfill %}{{ f(10**10) }}",
        "{{ ('a'|safe).rjust(10**10) }}",
        "{% filter center(10**10) %}a{% endfilter %}",
        "{{ 'a'|indent(10**10) }}",
        "{{ '%0999999999d' % 1 }}",
        "{{ '%*d' % (10**9, 1) }}",
        "{{ '%0999999999d'|format(1) }}",
        "{{ '{:999999999}'.format(1) }}",
        "{{ '{:{}}'.format(1, 10**9) }}",
        "{{ '{a:>999999999}'.format_map({'a': 1}) }}",
        "{{ [1]|tojson(indent=10**9) }}",
        "{{ []|slice(10**9)|list }}",
        "{{ [1]|batch(10**9, 0)|list }}",
        LONG + "{{ x|replace('a', x) }}",
        LONG + "{{ x.replace('', x) }}",
        LONG + "{{ x.join(range(100000)|map('string')) }}",
        LONG + "{{ range(100000)|map('string')|join(x) }}",
        LONG + "{{ ('{0}' * 100000).format(x) }}",
        "{{ range(100000)|map('center', 10**6)|list }}",
        "{{ 2 ** (10**9) }}",
        "{% set n = namespace(x=3) %}{% for i in range(99) %}{% set n.x = n.x * n.x %}{% endfor %}",
        "{{ ('f' * 10000)|int(base=16) }}",
        # Lists that stand in each other, which whoever looks at all of them never ends.
        *(NESTED + use for use in ("{{ n.a }}", "{{ n }}", "{{ n.a ~ '' }}", "{{ n.a|tojson }}", "{{ n.a == n.b }}")),
        *(NESTED + use for use in ("{{ n.a in [n.b] }}", "{{ [n.b].count(n.a) }}", "{{ '%s' % n.a }}")),
        *(NESTED + use for use in ("{{ '{}'.format(n.a) }}", "{{ [n.a, n.b]|sort }}", "{{ n.a|string }}")),
        NESTED + "{{ n.a is eq(n.b) }}",
        NESTED.replace("[0]", "(0,)").replace("[n.a, n.a]", "(n.a, n.a)") + "{{ {n.a: 1} }}",
        # Steps that are given back.
        "{% for i in range(100000) %}{% for j in range(9) %}{{ 'a'|indent(-10**9) }}{% endfor %}{% endfor %}",
        "{% for i in range(100000) %}{{ [-10**9]|map('spurline tick')|list }}{% endfor %}",
        # Small steps over a large text or list.
        "{% set x = 'a' * 100000 %}{% for i in range(100000) %}{{ 'b' in x }}{% endfor %}",
        "{% set x = 'a' * 100000 %}{% for i in range(100000) %}{% set y = x|upper %}{% endfor %}",
        "{% set x = [1] * 100000 %}{% for i in range(100000) %}{% set y = x[1:] %}{% endfor %}",
        *(f"{{% for i in range(100000) %}}{{% set y = range(100000){use} %}}{{% endfor %}}"
          for use in ("|sum", "|max", ".count('a')", "[::-1].index(0)")),
        "{% for i in range(100000) %}{{ 'a' in range(100000) }}{% endfor %}",
        "{% set x = 'a' * 100000 %}{% for i in range(100000) %}{% set y = x % {} %}{% endfor %}",
        "{{ ('a' * 10**7).split('a') }}",
    ],
)  # fmt: skip
def test_a_template_without_end_or_measure_is_refused(template: str) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(TemplateTooCostlyError):
        render(template, HELLO, track_generation="generation" in template)
    # KiB; unbounded, most of these take gigabytes.
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 300 << 10


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("a" * 1_000_000, "it has 1000000 characters"),
        ("{% if %}", "line 1: Expected an expression"),
        ("{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", "nested too deeply"),
        ("{% if 1 %}" * 500 + "{% endif %}" * 500, "nested too deeply"),
        ("{% for a in [] %}" * 30 + "{% endfor %}" * 30, "too many statically nested blocks"),
        ("{{ " + "9" * 5000 + " }}", "Exceeds the limit"),
        ("{{ {}|xmlattr }}", "No filter named 'xmlattr'"),
    ],
)
def test_a_template_that_cannot_be_compiled_is_the_models_fault(
    make_tokenizer: Callable[..., PreTrainedTokenizerFast], template: str, reason: str
) -> None:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = template
    tokenizer.chat_template_source = "mine.jinja"
    with pytest.raises(ModelError, match=reason) as caught:
        ChatRenderer(tokenizer).render(HELLO, None)
    assert str(caught.value).startswith("the chat template mine.jinja cannot be used: ")
    assert "`model.chat_template`" in str(caught.value)


@pytest.mark.parametrize(
    "template",
    [
        *("{{ 1 / 0 }}", "{{ range(10**9) }}", "{% include 'x' %}", "{{ a.b.c }}", "{{ ('a' * 9).encode('idna') }}"),
        *("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "{{ raise_exception('no') }}", "{{ '%d' is odd }}"),
    ],
)
def test_whatever_a_template_raises_names_the_template(
    make_tokenizer: Callable[..., PreTrainedTokenizerFast], template: str
) -> None:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = template
    tokenizer.chat_template_source = "mine.jinja"
    with pytest.raises(BadRowError, match=r"refused by the chat template mine\.jinja"):
        ChatRenderer(tokenizer).render(HELLO, None)


def test_a_costly_rendering_of_a_small_row_is_the_templates_fault_and_of_a_large_one_the_rows(
    make_tokenizer: Callable[..., PreTrainedTokenizerFast], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chat_template, "_STEPS_PER_MESSAGE", 10)
    tokenizer = make_tokenizer()
    tokenizer.chat_template = "{% for a in messages %}{% for b in messages %}{{ b.role }}{% endfor %}{% endfor %}"
    renderer = ChatRenderer(tokenizer)
    assert renderer.render(HELLO * 100, None) == "user" * 10_000
    with pytest.raises(BadRowError, match=r"are more than the chat template .* can render: .* Take the row out"):
        renderer.render(HELLO * 20_000, None)
    tokenizer.chat_template = "{% for a in range(100000) %}{{ a }}{% endfor %}"
    with pytest.raises(
        ModelError, match=r"not rendered any further: .* for a row of 1 messages\. .*`model.chat_template`"
    ):
        renderer.render(HELLO, None)


def test_a_long_row_has_steps_for_its_length() -> None:
    many = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "good day " * 20}] * 5_000
    large = [{"role": "user", "content": "word " * 4_000_000}]
    for template in (TEMPLATES["chatml"], TEMPLATES["qwen3"]):
        assert len(render(template, many)[0]) > 900_000
        assert len(render(template, large)[0]) > 20_000_000 - 10


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


def outcome(render: Callable[[], str]) -> str:
    try:
        return render()
    except Exception as error:  # noqa: BLE001 - whatever transformers raises, so does this
        return f"{type(error).__name__}: {error}"


@pytest.mark.parametrize("template", [*TEMPLATES.values(), USES], ids=[*TEMPLATES, "uses"])
@given(messages=MESSAGES, tools=TOOLS, prompt=st.booleans())
@settings(max_examples=25, deadline=None)
def test_templates_render_as_with_transformers(template: str, messages: Any, tools: Any, prompt: bool) -> None:
    variables = {**SPECIAL, "add_generation_prompt": prompt}

    def expected(count: int) -> str:
        return outcome(
            lambda: render_jinja_template(
                conversations=[messages[:count]], tools=tools, chat_template=template, **variables
            )[0][0]
        )

    compiled, chat = ChatTemplate(template, SPECIAL), PlainChat.of(messages, tools)
    # One object renders the whole conversation and its beginnings, which share their messages.
    for count in range(len(messages), -1, -1):
        beginning = chat.beginning(count)
        assert outcome(lambda: compiled.render(beginning, add_generation_prompt=prompt)[0]) == expected(count)  # noqa: B023


def test_every_use_renders() -> None:
    text, _ = render(USES, [*HELLO, {"role": "assistant", "content": "4. a\nb"}])
    assert str(datetime.now().year) in text


def test_spans_of_generation_blocks_are_those_of_transformers() -> None:
    messages: list[Any] = [*HELLO, {"role": "assistant", "content": "one"}] * 3
    texts, spans = render_jinja_template(
        conversations=[messages], chat_template=TEMPLATES["generation"], return_assistant_tokens_mask=True, **SPECIAL
    )
    assert render(TEMPLATES["generation"], messages, track_generation=True) == (texts[0], spans[0])


def test_a_template_is_compiled_once() -> None:
    assert compile_template(TEMPLATES["qwen3"]) is compile_template(TEMPLATES["qwen3"])


@pytest.mark.parametrize(
    "content", ['{"x": ' + "[" * 100_000, "[1]", '{"eos_token": 5}', '{"x": ' + "9" * 10_000 + "}"]
)
def test_tokenizer_files_that_cannot_be_read_name_the_model(tmp_path: Path, content: str) -> None:
    tiny_tokenizer().save_pretrained(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(content)
    with pytest.raises(ModelError, match=r"model.path: no tokenizer can be loaded from folder"):
        load_tokenizer(ModelConfig(path=str(tmp_path)))
