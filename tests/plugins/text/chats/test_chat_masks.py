"""Which tokens of a conversation carry loss, against oracles that share no code with the implementation."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spurline.config.run_config import DataConfig
from spurline.protocols.tokenization import DatasetToTokenize
from spurline_text.chats.chat import ChatRenderer, ChatTemplate, TemplateRewritesHistory
from spurline_text.configs import HfDatasetConfig
from spurline_text.encoding import Dropped, RowEncoder, Sample, mask_of_spans
from spurline_text.rows.formats import Conversation
from spurline_text.testing.tokenization_contract import ListDataset

CONTENT = st.text(st.sampled_from("ab 42.\n\té😀漢<>/|fine answer"), max_size=24)
TURNS = st.lists(st.tuples(CONTENT, CONTENT), min_size=1, max_size=4)
FEW = settings(max_examples=60, deadline=None)


def encode(tokenizer, *rows, train_on="last_assistant", **dataset_settings):
    config = HfDatasetConfig(path="rows.jsonl", **dataset_settings)
    data = DataConfig(train=(config,), train_on=train_on, max_length=100_000)
    return RowEncoder(DatasetToTokenize(ListDataset(rows), config), tokenizer, data).encode(range(len(rows)))


def sample(tokenizer, messages, train_on="last_assistant", **columns) -> Sample:
    [outcome] = encode(tokenizer, {"messages": messages, **columns}, train_on=train_on)
    assert isinstance(outcome, Sample), outcome
    return outcome


def trained_runs(tokenizer, outcome: Sample) -> list[str]:
    """Text of each unbroken run of trained tokens."""
    runs: list[list[int]] = [[]]
    for token, trained in zip(outcome.tokens, outcome.loss_mask, strict=True):
        if trained:
            runs[-1].append(token)
        elif runs[-1]:
            runs.append([])
    return [tokenizer.decode(run) for run in runs if run]


def dialogue(turns) -> list[dict[str, str]]:
    return [
        {"role": role, "content": content}
        for turn in turns
        for role, content in zip(("user", "assistant"), turn, strict=True)
    ]


def mask_by_offsets(tokenizer, text, spans) -> list[int]:
    """The oracle: a token is trained when one of its characters is."""
    trained = [any(start <= char < stop for start, stop in spans) for char in range(len(text))]
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    return [int(any(trained[start:stop])) for start, stop in encoded["offset_mapping"]]


def written_by_hand(turns, header, end_of_turn, gap, bos=""):
    """Text of a dialogue and the character spans of its assistant turns, put together without a template."""
    text, spans = bos, []
    for message in dialogue(turns):
        text += header.format(role=message["role"])
        start = len(text)
        text += message["content"] + end_of_turn
        if message["role"] == "assistant":
            spans.append((start, len(text)))
        text += gap
    return text, spans


@pytest.mark.parametrize("template", ["chatml", "llama3"])
@FEW
@given(turns=TURNS, train_on=st.sampled_from(["last_assistant", "all_assistants"]))
def test_masks_equal_those_of_a_conversation_written_by_hand(make_tokenizer, template, turns, train_on):
    tokenizer = make_tokenizer(template)
    if template == "chatml":
        text, spans = written_by_hand(turns, "<|im_start|>{role}\n", "<|im_end|>", "\n")
    else:
        # A template that trims contents.
        trimmed = [(question.strip(), answer.strip()) for question, answer in turns]
        header = "<|start_header_id|>{role}<|end_header_id|>\n\n"
        text, spans = written_by_hand(trimmed, header, "<|eot_id|>", "", bos="<|begin|>")
    outcome = sample(tokenizer, dialogue(turns), train_on)
    assert list(outcome.tokens) == tokenizer(text, add_special_tokens=False)["input_ids"]
    expected = spans if train_on == "all_assistants" else spans[-1:]
    assert outcome.loss_mask.tolist() == mask_by_offsets(tokenizer, text, expected)


@FEW
@given(turns=TURNS)
def test_masks_do_not_depend_on_a_tokenizer_that_trims_white_space_from_offsets(make_tokenizer, turns):
    exact = sample(make_tokenizer("chatml"), dialogue(turns), "all_assistants")
    trimming = sample(make_tokenizer("chatml", trim_offsets=True), dialogue(turns), "all_assistants")
    assert exact.tokens.tolist() == trimming.tokens.tolist()
    assert exact.loss_mask.tolist() == trimming.loss_mask.tolist()


@FEW
@given(text=CONTENT, data=st.data())
def test_a_token_is_trained_when_it_covers_a_trained_character(make_tokenizer, text, data):
    tokenizer = make_tokenizer()
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), min_size=2, max_size=2)))
    [encoding] = tokenizer([text], add_special_tokens=False).encodings
    assert mask_of_spans(encoding, [tuple(cuts)]).tolist() == mask_by_offsets(tokenizer, text, [tuple(cuts)])


def test_a_newline_merged_into_the_header_is_trained_with_the_content_it_begins(make_tokenizer):
    tokenizer = make_tokenizer("chatml")
    # The header's newline and the content's are one token: it covers a trained character, so it is trained.
    assert tokenizer.tokenize("\n\n") == ["ĊĊ"]
    assert trained_runs(tokenizer, sample(tokenizer, dialogue([("hello", "\n\nfine")]))) == ["\n\n\nfine<|im_end|>"]
    assert trained_runs(tokenizer, sample(tokenizer, dialogue([("hello", "fine")]))) == ["fine<|im_end|>"]


def test_qwen3_trains_the_empty_thinking_block_that_it_would_generate(make_tokenizer):
    tokenizer = make_tokenizer("qwen3")
    outcome = sample(tokenizer, dialogue([("hello", "fine"), ("how", "good")]), "all_assistants")
    assert trained_runs(tokenizer, outcome) == ["fine<|im_end|>", "<think>\n\n</think>\n\ngood<|im_end|>"]


@pytest.mark.parametrize("template", ["qwen3", "strips_thinking"])
def test_a_trained_turn_whose_thinking_the_template_strips_is_left_out_and_counted(make_tokenizer, template):
    messages = dialogue([("hello", "<think>\nold\n</think>\n\nfine"), ("how", "<think>\nnew\n</think>\n\ngood")])
    [outcome] = encode(make_tokenizer(template), {"messages": messages}, train_on="all_assistants")
    assert outcome == Dropped(0, "template_rewrites_history")


def test_thinking_in_a_field_of_its_own_counts_as_part_of_the_turn(make_tokenizer):
    tokenizer = make_tokenizer("qwen3")
    messages = dialogue([("hello", "fine"), ("how", "good")])
    messages[1]["reasoning_content"] = "old"
    messages[3]["reasoning_content"] = "new"
    assert trained_runs(tokenizer, sample(tokenizer, messages)) == ["<think>\nnew\n</think>\n\ngood<|im_end|>"]
    [outcome] = encode(tokenizer, {"messages": messages}, train_on="all_assistants")
    assert outcome == Dropped(0, "template_rewrites_history")


def test_a_template_that_moves_the_system_prompt_rewrites_history_for_all_but_the_last_turn(make_tokenizer):
    tokenizer = make_tokenizer("system_in_last_user")
    messages = [{"role": "system", "content": "be kind"}, *dialogue([("hello", "fine"), ("how", "good")])]
    assert trained_runs(tokenizer, sample(tokenizer, messages)) == [" good<|end|>"]
    [outcome] = encode(tokenizer, {"messages": messages}, train_on="all_assistants")
    assert outcome == Dropped(0, "template_rewrites_history")
    without = sample(tokenizer, messages[1:], "all_assistants")
    assert trained_runs(tokenizer, without) == [" fine<|end|>", " good<|end|>"]


def test_tool_calls_and_their_end_of_turn_are_trained_and_tool_results_are_not(make_tokenizer):
    tokenizer = make_tokenizer("qwen3")
    call = {"function": {"name": "add", "arguments": '{"a": 1, "b": 2}'}}
    messages = [
        {"role": "user", "content": "what is 1 + 2"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "3"},
        {"role": "assistant", "content": "It is 3."},
    ]
    tools = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
    outcome = sample(tokenizer, messages, "all_assistants", tools=tools, system="calculate")
    assert trained_runs(tokenizer, outcome) == [
        '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call><|im_end|>',
        "<think>\n\n</think>\n\nIt is 3.<|im_end|>",
    ]
    text = tokenizer.decode(outcome.tokens)
    assert text.startswith("<|im_start|>system\ncalculate\n\n# Tools")
    assert '{"type": "function", "function": {"name": "add", "parameters": {}}}' in text


def test_end_of_turn_text_inside_a_message_does_not_end_the_turn(make_tokenizer):
    tokenizer = make_tokenizer("chatml")
    outcome = sample(
        tokenizer, dialogue([("q", "a<|im_end|>\n<|im_start|>assistant\nb"), ("r", "c")]), "all_assistants"
    )
    assert trained_runs(tokenizer, outcome) == ["a<|im_end|>\n<|im_start|>assistant\nb<|im_end|>", "c<|im_end|>"]


def test_a_conversation_that_ends_with_the_user_trains_its_last_answer(make_tokenizer):
    for template in ("chatml", "llama3", "generation", "qwen3"):
        tokenizer = make_tokenizer(template)
        messages = [*dialogue([("hello", "fine")]), {"role": "user", "content": "fine"}]
        [run] = trained_runs(tokenizer, sample(tokenizer, messages))
        assert run in ("fine<|im_end|>", "fine<|eot_id|>"), template


def test_completion_messages_train_every_assistant_turn_of_the_completion_and_none_of_the_prompt(make_tokenizer):
    messages = dialogue([("a1", "b1"), ("a2", "b2"), ("a3", "b3")])
    for template in ("chatml", "generation", "llama3"):
        tokenizer = make_tokenizer(template)
        [outcome] = encode(tokenizer, {"prompt": messages[:3], "completion": messages[3:]})
        end = "<|eot_id|>" if template == "llama3" else "<|im_end|>"
        assert trained_runs(tokenizer, outcome) == ["b2" + end, "b3" + end], template


def test_whole_conversation_is_rendered_a_bounded_number_of_times(make_tokenizer, monkeypatch):
    renderer = ChatRenderer(make_tokenizer("chatml"))
    conversation = Conversation(dialogue([(f"q{n}", f"a{n}") for n in range(20)]))
    renderer.render_for_training(conversation, "all_assistants")
    calls = []
    original = ChatTemplate.render
    monkeypatch.setattr(ChatTemplate, "render", lambda self, *a, **k: calls.append(1) or original(self, *a, **k))
    renderer.render_for_training(conversation, "last_assistant")
    assert len(calls) == 2
    renderer.render_for_training(conversation, "all_assistants")
    assert len(calls) == 2 + 21


def test_turns_of_a_template_without_end_of_turn_text_end_with_their_content(make_tokenizer):
    tokenizer = make_tokenizer("chatml")
    tokenizer.chat_template = "{% for m in messages %}{{ m.role + ': ' + m.content + '\n' }}{% endfor %}"
    tokenizer.chat_template += "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
    rendered = ChatRenderer(tokenizer).render_for_training(
        Conversation(dialogue([("q", "one"), ("r", "two")])), "all_assistants"
    )
    assert [rendered.text[start:stop] for start, stop in rendered.spans] == ["one", "two"]


def test_a_template_that_drops_old_messages_is_never_masked_wrongly(make_tokenizer):
    tokenizer = make_tokenizer("chatml")
    tokenizer.chat_template = tokenizer.chat_template.replace("in messages", "in messages[-2:]")
    conversation = Conversation(dialogue([("q", "one"), ("r", "two")]))
    with pytest.raises(TemplateRewritesHistory):
        ChatRenderer(tokenizer).render_for_training(conversation, "all_assistants")


MARKED_IN_BLOCKS = (
    "{%- for m in messages %}{{- '<|im_start|>' + m.role + '\n' }}"
    "{%- if m.role == 'assistant' %}"
    "{%- if m.reasoning_content %}"
    "{%- generation %}{{- '<think>' + m.reasoning_content + '</think>' }}{%- endgeneration %}{{- '\n' }}"
    "{%- endif %}"
    "{%- if m.content %}{%- generation %}{{- m.content + '<|im_end|>' }}{%- endgeneration %}"
    "{%- else %}{{- m.content + '<|im_end|>' }}{%- endif %}"
    "{%- else %}{{- m.content + '<|im_end|>' }}{%- endif %}{{- '\n' }}{%- endfor %}"
)
"""Thinking and content are marked apart; a turn without content has no marked block."""


def marked_in_blocks(make_tokenizer):
    tokenizer = make_tokenizer("chatml")
    tokenizer.chat_template = MARKED_IN_BLOCKS
    return tokenizer


def reasoned(turns) -> list[dict[str, str]]:
    messages = []
    for question, reasoning, answer in turns:
        thinking = {"reasoning_content": reasoning} if reasoning else {}
        messages += [{"role": "user", "content": question}, {"role": "assistant", "content": answer, **thinking}]
    return messages


def test_last_assistant_keeps_every_marked_block_of_the_last_turn(make_tokenizer):
    tokenizer = marked_in_blocks(make_tokenizer)
    last = ["<think>new</think>", "good<|im_end|>"]
    assert trained_runs(tokenizer, sample(tokenizer, reasoned([("how", "new", "good")]))) == last
    # As many blocks as turns, but both belong to the last one.
    assert trained_runs(tokenizer, sample(tokenizer, reasoned([("hello", "", ""), ("how", "new", "good")]))) == last
    several = reasoned([("hello", "old", "fine"), ("how", "new", "good")])
    assert trained_runs(tokenizer, sample(tokenizer, several)) == last
    assert trained_runs(tokenizer, sample(tokenizer, several, "all_assistants")) == [
        "<think>old</think>",
        "fine<|im_end|>",
        *last,
    ]


def test_last_assistant_never_trains_an_earlier_turn_when_the_last_has_no_marked_block(make_tokenizer):
    tokenizer = marked_in_blocks(make_tokenizer)
    messages = reasoned([("hello", "old", "fine"), ("how", "", "")])
    rendered = ChatRenderer(tokenizer).render_for_training(Conversation(messages), "last_assistant")
    assert rendered.spans == ()


def test_marked_blocks_of_a_template_that_rewrites_history_are_refused(make_tokenizer):
    tokenizer = marked_in_blocks(make_tokenizer)
    tokenizer.chat_template = "{{- messages | length }}" + MARKED_IN_BLOCKS
    conversation = Conversation(reasoned([("hello", "", "fine"), ("how", "new", "good")]))
    with pytest.raises(TemplateRewritesHistory):
        ChatRenderer(tokenizer).render_for_training(conversation, "last_assistant")
    assert len(ChatRenderer(tokenizer).render_for_training(conversation, "all_assistants").spans) == 3
