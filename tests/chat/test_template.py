"""Templates: found, rendered as transformers renders them, and bounded."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from edgellm.chat import ChatModel, prepare_chat, read_template, sandbox
from edgellm.chat.template import CHATML, render
from edgellm.errors import ConfigError, InvalidRequestError

HELLO = [{"role": "user", "content": "Hello"}]


def model(template: str, **kwargs: Any) -> ChatModel:
    return ChatModel(templates={"default": template}, **kwargs)


def test_the_models_own_template_is_rendered() -> None:
    prepared = prepare_chat(model("{{ messages[0].content }}!"), HELLO)
    assert prepared.prompt == "Hello!"


def test_a_model_without_a_template_gets_chatml() -> None:
    prompt = prepare_chat(ChatModel(), HELLO).prompt
    assert prompt == "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"


def test_tools_choose_the_named_template() -> None:
    own = ChatModel(templates={"default": "plain", "tool_use": "{{ tools[0].function.name }}"})
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    assert prepare_chat(own, HELLO).prompt == "plain"
    assert prepare_chat(own, HELLO, tools=tools).prompt.startswith("f")


def test_an_override_is_a_name_or_a_text() -> None:
    own = ChatModel(templates={"default": "a", "rag": "b"})
    assert prepare_chat(own, HELLO, template="rag").prompt == "b"
    assert prepare_chat(own, HELLO, template="{{ 'c' }}").prompt == "c"
    with pytest.raises(InvalidRequestError, match="default, rag"):
        prepare_chat(own, HELLO, template="other")


def test_an_override_file_is_checked_when_read(tmp_path: Path) -> None:
    good, bad = tmp_path / "good.jinja", tmp_path / "bad.jinja"
    good.write_text(CHATML)
    bad.write_text("line\n{% if %}")
    assert read_template(good) == CHATML
    with pytest.raises(ConfigError, match="line 2"):
        read_template(bad)
    with pytest.raises(ConfigError, match="cannot read"):
        read_template(tmp_path / "none.jinja")


@pytest.mark.parametrize(
    ("template", "add_bos", "prompt", "add_special"),
    [
        ("{{ bos_token }}x", True, "<s>x", False),
        ("x", True, "x", True),
        ("{{ bos_token }}{{ bos_token }}x", True, "<s>x", False),
        ("x", False, "x", False),
        ("{{ bos_token }}x", False, "<s>x", False),
    ],
)
def test_the_prompt_has_exactly_one_bos(
    template: str, add_bos: bool, prompt: str, add_special: bool
) -> None:
    prepared = prepare_chat(model(template, bos_text="<s>", add_bos=add_bos), HELLO)
    assert (prepared.prompt, prepared.add_special) == (prompt, add_special)


def test_json_is_written_as_transformers_writes_it() -> None:
    assert render("{{ x | tojson }}", {"x": {"a": "é<'>"}}) == '{"a": "é<\'>"}'
    assert render("{{ x | tojson(indent=2) }}", {"x": [1]}) == "[\n  1\n]"


def test_loop_controls_and_generation_blocks_work() -> None:
    source = "{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}"
    assert render(source, {}) == "01"
    assert render("a{% generation %}{{ 'b' }}{% endgeneration %}c", {}) == "abc"


def test_the_date_is_there() -> None:
    assert render("{{ strftime_now('%Y') }}", {}) == time.strftime("%Y")


@pytest.mark.parametrize(
    ("template", "line"),
    [
        ("a\n{{ messages[0].missing.deeper }}", 2),
        ("{#\n#}\n\n{{ 1 / 0 }}", 4),
        ("a\nb\n{% if %}", 3),
        ("\n{{ 'x' | nosuchfilter }}", 2),
    ],
)
def test_a_failing_template_says_where(template: str, line: int) -> None:
    with pytest.raises(InvalidRequestError, match=f"line {line}"):
        prepare_chat(model(template), HELLO)


def test_a_templates_own_refusal_is_passed_on() -> None:
    with pytest.raises(InvalidRequestError, match="must alternate"):
        prepare_chat(model("{{ raise_exception('roles must alternate') }}"), HELLO)


def test_extra_names_reach_the_template_but_cannot_replace_the_messages() -> None:
    source = "{{ tone }} {{ messages[0].content }}"
    prepared = prepare_chat(model(source), HELLO, template_kwargs={"tone": "kind", "messages": []})
    assert prepared.prompt == "kind Hello"


NESTED = (
    "{% set ns = namespace(x=[1]) %}"
    "{% for i in range(99) %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}"
)
HOSTILE = {
    "nested loops": "{% for a in range(99999) %}{% for b in range(99999) %}"
    "{% for c in range(99999) %}{% endfor %}{% endfor %}{% endfor %}",
    "text times a number": "{{ 'x' * 10 ** 10 }}",
    "a power": "{{ 9 ** (9 ** 9) }}",
    "squares": "{% set ns = namespace(x=9) %}"
    "{% for i in range(99) %}{% set ns.x = ns.x * ns.x %}{% endfor %}{{ ns.x }}",
    "doubling by plus": "{% set ns = namespace(x='ab') %}"
    "{% for i in range(99) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
    "doubling by tilde": "{% set ns = namespace(x='ab') %}"
    "{% for i in range(99) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
    "doubling by macro": "{% set ns = namespace(x='ab') %}{% for i in range(99) %}"
    "{% set y %}{{ ns.x }}{{ ns.x }}{% endset %}{% set ns.x = y %}{% endfor %}",
    "doubling by replace": "{% set ns = namespace(x='aa') %}"
    "{% for i in range(99) %}{% set ns.x = ns.x.replace('a', 'aa') %}{% endfor %}",
    "doubling by the replace filter": "{% set ns = namespace(x='aa') %}"
    "{% for i in range(99) %}{% set ns.x = ns.x | replace('a', 'aa') %}{% endfor %}",
    "doubling by join": "{% set ns = namespace(x='aa') %}"
    "{% for i in range(99) %}{% set ns.x = [ns.x, ns.x] | join %}{% endfor %}",
    "a list in itself, printed": "{% set ns = namespace(x=[1]) %}"
    "{% for i in range(99) %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}{{ ns.x }}",
    "a list in itself, as JSON": "{% set ns = namespace(x=[1]) %}"
    "{% for i in range(99) %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}{{ ns.x | tojson }}",
    "lists compared": "{% set n = namespace(x=[1], y=[1]) %}{% for i in range(99) %}"
    "{% set n.x = [n.x, n.x] %}{% set n.y = [n.y, n.y] %}{% endfor %}{{ n.x == n.y }}",
    "tuples hashed": "{% set ns = namespace(x=(1,)) %}"
    "{% for i in range(99) %}{% set ns.x = (ns.x, ns.x) %}{% endfor %}{{ {}[ns.x].y }}",
    "a list looked up": NESTED + "{{ [].index(ns.x) }}",
    "a list tested": NESTED + "{{ (ns.x is in [ns.x + [1]]) }}{{ ns.x is eq(0) }}",
    "a list refused": NESTED + "{{ raise_exception(ns.x) }}",
    "a list as a name": NESTED + "{{ messages | attr(ns.x) }}",
    "centred": "{{ 'x'.center(10 ** 10) }}",
    "a wide format": "{{ '%9999999999d' % 1 }}",
    "a wide format method": "{{ '{:9999999999}'.format(1) }}",
    "a width within a width": "{{ '{:{}}'.format(1, 9999999999) }}",
    "rounded to a billion places": "{{ 1.5 | round(10 ** 9, 'ceil') }}",
    "slices": "{{ [1] | slice(10 ** 9) | list }}",
    "batches": "{{ [1] | batch(10 ** 9, 'x') | list }}",
    "endless recursion": "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "output without end": "{% for a in range(99999) %}{% for b in range(99999) %}"
    + "x" * 1000
    + "{% endfor %}{% endfor %}",
    "deep brackets": "{{ " + "(" * 50_000 + "1" + ")" * 50_000 + " }}",
    "deep blocks": "{% if x %}" * 5_000 + "{% endif %}" * 5_000,
    "latin": "{{ lipsum(n=10 ** 9) }}",
    "python's internals": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "changing a message": "{{ messages.append(1) }}",
    "another file": "{% include '/etc/passwd' %}",
}


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_template_ends_with_an_error(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # Smaller budgets than the product's, so that the test is quick; a hang is the timeout's.
    monkeypatch.setattr(sandbox, "MAX_CPU_SECONDS", 0.2)
    monkeypatch.setattr(sandbox, "MAX_CHARS", 8 << 20)
    monkeypatch.setattr(sandbox, "MAX_WEIGHT", 50_000)
    with pytest.raises(InvalidRequestError):
        prepare_chat(model(HOSTILE[name]), HELLO)


def test_the_budget_of_one_render_is_not_the_next_ones() -> None:
    source = "{% for i in range(50000) %}{{ 'x' ~ i }}{% endfor %}"
    for _ in range(3):
        assert len(prepare_chat(model(source), HELLO).prompt) > 50_000
