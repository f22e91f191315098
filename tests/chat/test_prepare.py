# ruff: noqa: E501  (recorded answers are not wrapped)
"""prepare_chat over templates in the format of each family: prompts, grammars, parsers, turns."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from edgellm.chat import ChatModel, PreparedChat, prepare_chat
from edgellm.engine.constrain import Constraint, ConstraintFactory, Vocabulary, make_factory
from edgellm.errors import InvalidRequestError
from edgellm.request import GrammarKind
from tests.chat.answers import answer_of

HERE = Path(__file__).parent
NAMES = sorted(path.stem for path in (HERE / "templates").glob("*.jinja"))
USER = {"role": "user", "content": "Weather in Paris?"}
CALL = {"type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Paris"}'}}
CONVERSATION: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief."},
    USER,
    {"role": "assistant", "content": None, "tool_calls": [{"id": None, **CALL}]},
    {"role": "tool", "tool_call_id": None, "content": "sunny"},
    {"role": "assistant", "content": "Sunny."},
    {
        "role": "user",
        "content": [{"type": "text", "text": "And"}, {"type": "text", "text": "Rome?"}],
    },
]
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}},
                "required": ["city"],
            },
        },
    }
]
SCHEMA = {
    "type": "json_schema",
    "json_schema": {
        "name": "x",
        "strict": True,
        "schema": {
            "type": "object",
            "properties": {"n": {"type": "integer"}},
            "required": ["n"],
            "additionalProperties": False,
        },
    },
}


def model(name: str) -> ChatModel:
    text = (HERE / "templates" / f"{name}.jinja").read_text(encoding="utf-8")
    return ChatModel(
        templates={"default": text}, bos_text="<s>", eos_text="</s>", add_bos=name != "phi"
    )


def prepare(name: str, messages: Any = (USER,), **kwargs: Any) -> PreparedChat:
    return prepare_chat(model(name), messages, **kwargs)


MARKERS = ["<think>", "</think>", "<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]"]
MARKERS += ["<|START_THINKING|>", "<|END_THINKING|>", "<|START_ACTION|>", "<|END_ACTION|>"]
MARKERS += ["<|channel|>", "<|message|>", "<|end|>", "<|start|>", "<|constrain|>"]
MARKERS += ["<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"]


@pytest.fixture(scope="module", params=[True, False], ids=["control tokens", "spelled"])
def factory(request: pytest.FixtureRequest) -> ConstraintFactory:
    """Bytes as tokens; the markers are control tokens, or none of them is a token."""
    tokens = [bytes([i]) for i in range(256)] + [b"<eos>"]
    if request.param:
        tokens += [marker.encode() for marker in MARKERS]
    return make_factory(Vocabulary(tokens, frozenset(range(256, len(tokens))), (256,)))


def tokens_of(factory: ConstraintFactory, text: str) -> list[int]:
    """Markers that are tokens as such, the rest byte by byte."""
    pieces = re.split("(" + "|".join(map(re.escape, MARKERS)) + ")", text)
    out: list[int] = []
    for piece in pieces:
        whole = 257 + MARKERS.index(piece) if piece in MARKERS else len(factory.vocabulary.tokens)
        out += [whole] if whole < len(factory.vocabulary.tokens) else list(piece.encode())
    return out


def start(factory: ConstraintFactory, prepared: PreparedChat) -> Constraint:
    assert prepared.grammar is not None
    return factory.compile(prepared.grammar)


def fits(factory: ConstraintFactory, prepared: PreparedChat, text: str) -> bool:
    """Whether the grammar lets a model write ``text`` and stop there."""
    constraint = start(factory, prepared)
    for token in tokens_of(factory, text):
        if constraint.accepts([token]) == 0:
            return False
        constraint.accept(token)
    return constraint.can_stop


@pytest.mark.parametrize("name", NAMES)
def test_a_whole_conversation_renders_as_recorded(name: str) -> None:
    expected = (HERE / "golden" / f"{name}.txt").read_text(encoding="utf-8")
    assert prepare(name, CONVERSATION, tools=TOOLS).prompt == expected


@pytest.mark.parametrize("name", NAMES)
def test_rendering_twice_gives_the_same_so_that_prefixes_can_be_shared(name: str) -> None:
    first, second = (prepare(name, CONVERSATION, tools=TOOLS) for _ in range(2))
    assert first.prompt == second.prompt
    assert first.grammar == second.grammar


@pytest.mark.parametrize("name", NAMES)
def test_turns_begin_at_user_messages_and_leave_the_system_prompt(name: str) -> None:
    prepared = prepare(name, CONVERSATION, tools=TOOLS)
    last = prepared.turn_starts[-1]
    assert prepared.turn_starts == tuple(sorted(set(prepared.turn_starts)))
    assert "Rome?" in prepared.prompt[last:]
    assert "Sunny." not in prepared.prompt[last:]
    assert prepared.n_keep_chars == prepared.turn_starts[0]
    assert "Be brief." in prepared.prompt[: prepared.n_keep_chars]
    assert "get_weather" in prepared.prompt[: prepared.n_keep_chars]


def test_a_slid_prompt_is_a_prompt_of_fewer_turns() -> None:
    talk = [{"role": "system", "content": "S"}]
    for i in range(4):
        talk += [{"role": "user", "content": f"q{i}"}, {"role": "assistant", "content": f"a{i}"}]
    talk.append({"role": "user", "content": "last"})
    prepared = prepare("chatml-think", talk)
    assert len(prepared.turn_starts) == 5
    slid = prepared.prompt[: prepared.n_keep_chars] + prepared.prompt[prepared.turn_starts[2] :]
    assert slid == prepare("chatml-think", [talk[0], *talk[5:]]).prompt


def test_texts_of_several_parts_are_joined_by_lines() -> None:
    assert "And\nRome?" in prepare("llama3", CONVERSATION).prompt


def test_a_system_prompt_moves_where_the_template_lets_it() -> None:
    talk = [{"role": "system", "content": "Be brief."}, USER]
    assert "user\nBe brief.\n\nWeather" in prepare("gemma", talk).prompt
    assert "<|user|>\nBe brief.\n\nWeather" in prepare("phi", talk).prompt


def test_neighbours_of_one_role_are_merged_where_roles_alternate() -> None:
    prompt = prepare("gemma", [USER, {"role": "user", "content": "Now?"}]).prompt
    assert "Weather in Paris?\n\nNow?" in prompt


def test_the_developer_role_is_kept_where_it_is_known() -> None:
    talk = [{"role": "developer", "content": "Be brief."}, USER]
    assert (
        "<|start|>developer<|message|># Instructions\n\nBe brief."
        in prepare("harmony", talk).prompt
    )
    assert "<|im_start|>system\nBe brief." in prepare("chatml-think", talk).prompt


def test_mistral_gets_ids_of_nine_characters_for_calls_and_their_results() -> None:
    long_id = {"id": "call_0123456789abcdef", **CALL}
    talk = [
        USER,
        {"role": "assistant", "content": "", "tool_calls": [long_id]},
        {"role": "tool", "tool_call_id": "call_0123456789abcdef", "content": "sunny"},
    ]
    assert "[TOOL_RESULTS]sunny" in prepare("mistral", talk, tools=TOOLS).prompt


def test_arguments_that_are_no_json_are_kept_as_text() -> None:
    broken = {"id": "a", "function": {"name": "get_weather", "arguments": '{"city": '}}
    talk = [USER, {"role": "assistant", "content": None, "tool_calls": [broken]}, USER]
    assert '{\\"city\\": ' in prepare("chatml-think", talk, tools=TOOLS).prompt


def test_the_last_answer_can_be_continued() -> None:
    talk = [USER, {"role": "assistant", "content": "It is "}]
    prompt = prepare("chatml-think", talk, continue_final_message=True).prompt
    assert prompt.endswith("<|im_start|>assistant\nIt is")


def test_a_continued_answer_keeps_the_space_before_its_next_word() -> None:
    talk = [USER, {"role": "assistant", "content": "It is"}]
    for name in ("chatml-think", "llama3", "mistral"):
        prepared = prepare(name, talk, tools=TOOLS, continue_final_message=True)
        assert answer_of(prepared.parser, [" sun", "ny"]).content == " sunny"


def test_a_promise_cannot_begin_in_the_middle_of_a_message() -> None:
    talk = [USER, {"role": "assistant", "content": "{"}]
    with pytest.raises(InvalidRequestError, match="continued"):
        prepare("llama3", talk, response_format=SCHEMA, continue_final_message=True)


def test_a_clients_own_grammar_waits_for_the_end_of_opened_thinking() -> None:
    assert prepare("deepseek").grammar_after == "</think>"
    assert prepare("chatml-think").grammar_after is None


WRONG: list[tuple[Any, dict[str, Any], str]] = [
    ([], {}, "messages"),
    ("hi", {}, "messages"),
    ([1], {}, "messages[0]"),
    ([{"role": "king", "content": "x"}], {}, "messages[0].role"),
    ([{"role": ["user"], "content": "x"}], {}, "messages[0].role"),
    ([{"role": "user"}], {}, "messages[0].content"),
    ([{"role": "user", "content": 5}], {}, "messages[0].content"),
    ([USER, {"role": "user", "content": [{"type": "image_url"}]}], {}, "messages[1].content[0]"),
    ([{"role": "user", "content": [{"type": "audio"}]}], {}, "messages[0].content[0].type"),
    ([{"role": "user", "content": [{"type": "text"}]}], {}, "messages[0].content[0].text"),
    ([{"role": "assistant", "tool_calls": [{}]}], {}, "messages[0].tool_calls[0].function.name"),
    ([USER], {"tools": [{"type": "retrieval"}]}, "tools[0].type"),
    ([USER], {"tools": [{"type": "function"}]}, "tools[0].function"),
    ([USER], {"tools": [{"function": {"name": "a b"}}]}, "tools[0].function.name"),
    ([USER], {"tools": [*TOOLS, *TOOLS]}, "tools[1].function.name"),
    ([USER], {"tools": TOOLS, "tool_choice": "maybe"}, "tool_choice"),
    ([USER], {"tools": TOOLS, "tool_choice": {"function": {"name": "no"}}}, "tool_choice"),
    ([USER], {"tool_choice": "required"}, "tool_choice"),
    ([USER], {"reasoning_effort": "some"}, "reasoning_effort"),
    ([USER], {"template_kwargs": [1]}, "chat_template_kwargs"),
    ([USER], {"response_format": {"type": "xml"}}, "response_format.type"),
]


@pytest.mark.parametrize(("messages", "kwargs", "param"), WRONG)
def test_what_is_wrong_is_named(messages: Any, kwargs: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        prepare("chatml-think", messages, **kwargs)
    assert caught.value.param == param


# Tools

CALLS = {
    "chatml-think": '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>',
    "llama3": '{"name": "get_weather", "parameters": {"city": "Paris"}}',
    "mistral": '[TOOL_CALLS]get_weather[ARGS]{"city": "Paris"}',
    "gemma": '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>',
    "command": '<|START_ACTION|>[{"tool_name": "get_weather", "parameters": {"city": "Paris"}}]<|END_ACTION|>',
    "glm": "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Paris</arg_value>\n</tool_call>",
    "harmony": '<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{"city": "Paris"}',
}


@pytest.mark.parametrize("name", CALLS)
def test_required_lets_only_a_call_through_and_reads_it(
    factory: ConstraintFactory, name: str
) -> None:
    prepared = prepare(name, tools=TOOLS, tool_choice="required")
    assert fits(factory, prepared, CALLS[name])
    assert not fits(factory, prepared, "It is sunny.")
    assert not fits(factory, prepared, CALLS[name].replace("city", "town"))
    assert answer_of(prepared.parser, CALLS[name]).values == [("get_weather", {"city": "Paris"})]


THOUGHTS = {
    "chatml-think": "<think>\nParis, then.\n</think>\n\n",
    "command": "<|START_THINKING|>Paris, then.<|END_THINKING|>",
    "glm": "<think>Paris, then.</think>\n",
    "harmony": "<|channel|>analysis<|message|>Paris, then.<|end|><|start|>assistant",
}


@pytest.mark.parametrize("name", THOUGHTS)
def test_a_model_may_think_before_a_required_call(factory: ConstraintFactory, name: str) -> None:
    prepared = prepare(name, tools=TOOLS, tool_choice="required")
    text = THOUGHTS[name] + CALLS[name]
    assert fits(factory, prepared, text)
    assert not fits(factory, prepared, THOUGHTS[name])
    answer = answer_of(prepared.parser, text)
    assert answer.reasoning == "Paris, then."
    assert answer.values == [("get_weather", {"city": "Paris"})]


@pytest.mark.parametrize("name", CALLS)
def test_auto_sleeps_until_a_call_begins(factory: ConstraintFactory, name: str) -> None:
    prepared = prepare(name, tools=TOOLS)
    constraint = start(factory, prepared)
    # Llama's calls have no tag: an answer is one from its first letter, or none.
    for byte in b"\n" if name == "llama3" else b"Let me see. ":
        assert not constraint.needs_mask
        assert constraint.can_stop
        constraint.accept(byte)
    for token in tokens_of(factory, CALLS[name]):
        constraint.accept(token)
    assert constraint.needs_mask
    assert constraint.can_stop


def test_json_within_a_llamas_answer_is_no_call(factory: ConstraintFactory) -> None:
    constraint = start(factory, prepare("llama3", tools=TOOLS))
    for byte in b'Write {"name": "Bob"}':
        constraint.accept(byte)
    assert not constraint.needs_mask


def test_a_named_function_alone_may_be_called(factory: ConstraintFactory) -> None:
    other = {"type": "function", "function": {"name": "other", "parameters": {}}}
    choice = {"type": "function", "function": {"name": "get_weather"}}
    prepared = prepare("chatml-think", tools=[*TOOLS, other], tool_choice=choice)
    assert "other" in prepared.prompt
    assert fits(factory, prepared, CALLS["chatml-think"])
    call = '<tool_call>\n{"name": "other", "arguments": {}}\n</tool_call>'
    assert not fits(factory, prepared, call)


def test_allowed_tools_narrow_the_choice(factory: ConstraintFactory) -> None:
    other = {"type": "function", "function": {"name": "other", "parameters": {}}}
    named = [{"type": "function", "name": "get_weather"}]
    allowed = {"type": "allowed_tools", "mode": "required", "tools": named}
    prepared = prepare("chatml-think", tools=[*TOOLS, other], tool_choice=allowed)
    assert fits(factory, prepared, CALLS["chatml-think"])
    assert not fits(factory, prepared, CALLS["chatml-think"].replace("get_weather", "other"))


def test_parallel_calls_can_be_turned_off(factory: ConstraintFactory) -> None:
    two = f"{CALLS['chatml-think']}\n{CALLS['chatml-think']}"
    for parallel in (True, False):
        prepared = prepare(
            "chatml-think", tools=TOOLS, tool_choice="required", parallel_tool_calls=parallel
        )
        assert fits(factory, prepared, two) is parallel


def test_none_hides_the_tools() -> None:
    prepared = prepare("chatml-think", tools=TOOLS, tool_choice="none")
    assert "get_weather" not in prepared.prompt
    assert prepared.grammar is None
    assert answer_of(prepared.parser, CALLS["chatml-think"]).calls == []


def test_a_template_without_tools_has_them_told_in_the_system_prompt() -> None:
    prepared = prepare("gemma", tools=TOOLS)
    assert '<tools>\n{"type": "function"' in prepared.prompt
    assert prepared.grammar is not None
    assert prepared.grammar.trigger == "<tool_call>"


def test_a_template_that_needs_descriptions_gets_them() -> None:
    source = (
        "{% for t in tools or [] %}{{ t.function.name }}"
        "{% for k, v in t.function.parameters.properties.items() %}"
        "{{ ':' + k + v.description }}{% endfor %}{% endfor %}"
    )
    own = ChatModel(templates={"default": source})
    assert prepare_chat(own, [USER], tools=TOOLS).prompt == "get_weather:city"


def test_a_relaxed_schema_is_told() -> None:
    tool = {"function": {"name": "f", "parameters": {"properties": {"a": {"format": "odd"}}}}}
    warnings = prepare("chatml-think", tools=[tool]).warnings
    assert len(warnings) == 1
    assert warnings[0].startswith("tools[0].function.parameters.properties.a.format: ")


# Structured answers


@pytest.mark.parametrize("name", NAMES)
def test_a_schema_is_promised_whatever_the_family(factory: ConstraintFactory, name: str) -> None:
    prepared = prepare(name, response_format=SCHEMA)
    lead = {"harmony": "<|channel|>final<|message|>", "deepseek": "hm</think>\n\n"}.get(name, "")
    assert fits(factory, prepared, lead + '{"n": 1}')
    assert fits(factory, prepared, lead + '{\n  "n": 1\n}')
    assert not fits(factory, prepared, lead + '{"n": "1"}')
    assert not fits(factory, prepared, lead)
    assert answer_of(prepared.parser, lead + '{"n": 1}').content == '{"n": 1}'


@pytest.mark.parametrize("name", THOUGHTS)
def test_a_model_may_think_before_a_structured_answer(
    factory: ConstraintFactory, name: str
) -> None:
    prepared = prepare(name, response_format=SCHEMA)
    lead = "<|channel|>final<|message|>" if name == "harmony" else ""
    text = f'{THOUGHTS[name]}{lead}{{"n": 1}}'
    assert fits(factory, prepared, text)
    answer = answer_of(prepared.parser, text)
    assert (answer.reasoning, answer.content) == ("Paris, then.", '{"n": 1}')


def test_a_plain_model_gets_the_schema_itself() -> None:
    prepared = prepare("llama3", response_format=SCHEMA)
    assert prepared.grammar is not None
    assert prepared.grammar.kind is GrammarKind.JSON_SCHEMA


def test_tools_and_a_schema_leave_the_choice(factory: ConstraintFactory) -> None:
    prepared = prepare("chatml-think", tools=TOOLS, response_format=SCHEMA)
    assert fits(factory, prepared, CALLS["chatml-think"])
    assert fits(factory, prepared, '{"n": 1}')
    assert not fits(factory, prepared, "Sunny.")


def test_what_cannot_be_enforced_in_an_answer_is_refused() -> None:
    schema = {"type": "object", "properties": {"a": {"not": {}}}}
    wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    with pytest.raises(InvalidRequestError, match=r"\$\.properties\.a\.not"):
        prepare("llama3", response_format=wanted)


# Thinking


def test_thinking_that_the_prompt_opened_is_read_from_the_start() -> None:
    prepared = prepare("deepseek")
    assert prepared.prompt.endswith("<think>\n")
    answer = answer_of(prepared.parser, "I think.\n</think>\n\nSo.")
    assert (answer.reasoning, answer.content) == ("I think.", "So.")


def test_a_budget_that_ends_inside_thinking_is_told() -> None:
    prepared = prepare("deepseek")
    answer = answer_of(prepared.parser, "I think and")
    assert (answer.reasoning, answer.content) == ("I think and", "")
    assert any("inside the model's thinking" in w for w in prepared.parser.warnings)


@pytest.mark.parametrize(
    ("name", "effort", "text"),
    [
        ("chatml-think", "none", "<think>\n\n</think>\n\n"),
        ("glm", "none", "<think></think>"),
        ("harmony", "high", "Reasoning: high"),
        ("harmony", "none", "Reasoning: low"),
        ("harmony", None, "Reasoning: medium"),
    ],
)
def test_the_effort_reaches_the_template(name: str, effort: str | None, text: str) -> None:
    assert text in prepare(name, reasoning_effort=effort).prompt


def test_template_variables_win_over_the_effort() -> None:
    kwargs = {"enable_thinking": False}
    prompt = prepare("chatml-think", reasoning_effort="high", template_kwargs=kwargs).prompt
    assert prompt.endswith("</think>\n\n")


def test_each_choice_has_its_own_parser() -> None:
    prepared = prepare("deepseek")
    first, second = prepared.parser, prepared.new_parser()
    assert prepared.parser is first
    answer_of(first, "a</think>b")
    assert answer_of(second, "c</think>d").summary == ("d", "c", [])


def test_a_model_that_neither_thinks_nor_calls_is_passed_through() -> None:
    answer = answer_of(prepare("llama3").parser, ["  a", " <think> ", "\n"])
    assert answer.content == "  a <think> \n"
