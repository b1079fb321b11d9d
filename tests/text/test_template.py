"""Chat templates: equal to transformers on what checkpoints ship; bounded and explained on what nobody should ship."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from headway.core.errors import BadInput, ModelFileError
from headway.text.template import ChatTemplate, checked_messages

TEMPLATES = Path(__file__).parents[1] / "data" / "templates"
TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
USER = {"role": "user", "content": "  Was ist 2 < 3 & 'x'? \n"}
TOOLS = [{"type": "function", "name": "zähle", "function": {"name": "zähle", "parameters": {"type": "object"}}}]
CALL = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": {"ä": [1, "<"]}}}]}
CONVERSATIONS = {
    "one turn": [USER],
    "three turns": [
        USER,
        {"role": "assistant", "content": "<think>hm</think>\nJa."},
        {"role": "user", "content": "🎉"},
    ],
    "system": [{"role": "system", "content": "Sei kurz."}, USER],
    "system with newlines": [{"role": "system", "content": "\n\n a \n"}, USER],
    "a tool call": [USER, CALL, {"role": "tool", "content": "[1]"}, {"role": "tool", "content": "2"}],
    "words": [USER, {"role": "user", "content": "skip"}, {"role": "assistant", "content": "enough"}],
    "an odd role": [USER, {"role": "narrator", "content": "Meanwhile"}],
}


@pytest.fixture
def template(request: pytest.FixtureRequest) -> Iterator[ChatTemplate]:
    made = ChatTemplate(request.param, TOKENS)
    yield made
    made.close()


def outcome(template: ChatTemplate, messages: list[dict], **options: object) -> str:
    try:
        return template.render(messages, **options)  # type: ignore[arg-type]
    except (BadInput, ModelFileError) as error:
        return f"{type(error).__name__}: {error}"


# -- parity ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(path.stem for path in TEMPLATES.glob("*.jinja")))
def test_renders_as_transformers_does(name: str) -> None:
    utils = pytest.importorskip("transformers.utils.chat_template_utils")
    source = (TEMPLATES / f"{name}.jinja").read_text()
    ours = ChatTemplate(source, TOKENS)
    rendered = 0
    for messages in CONVERSATIONS.values():
        for tools in (None, TOOLS):
            for prompt in (True, False):
                plain = [{key: value for key, value in message.items() if value is not None} for message in messages]
                options = {"tools": tools, "add_generation_prompt": prompt}
                try:
                    (expected,), _ = utils.render_jinja_template([plain], chat_template=source, **options, **TOKENS)
                except Exception as error:  # whatever transformers raises, the same sentence must come out here
                    assert str(error) in outcome(ours, messages, **options)
                else:
                    assert ours.render(messages, **options) == expected
                    rendered += 1
    ours.close()
    assert rendered >= 8


# -- messages ----------------------------------------------------------------------------------------------------------


def test_text_parts_become_one_string() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert checked_messages([{"role": "user", "content": parts}]) == [{"role": "user", "content": "a\nb"}]


def test_fields_that_are_none_are_left_out_and_others_kept() -> None:
    message = {"role": "assistant", "content": None, "tool_calls": [{"id": "1"}], "name": None, "reasoning": "r"}
    assert checked_messages([message]) == [{"role": "assistant", "tool_calls": [{"id": "1"}], "reasoning": "r"}]


@pytest.mark.parametrize(
    ("messages", "field"),
    [
        ([], "messages"),
        (["hi"], "messages[0]"),
        ([{"content": "hi"}], "messages[0].role"),
        ([{"role": "", "content": "hi"}], "messages[0].role"),
        ([{"role": 3, "content": "hi"}], "messages[0].role"),
        ([USER, {"role": "user"}], "messages[1].content"),
        ([{"role": "user", "content": None}], "messages[0].content"),
        ([{"role": "user", "content": 5}], "messages[0].content"),
        ([{"role": "user", "content": {"type": "text"}}], "messages[0].content"),
        ([{"role": "user", "content": ["hi"]}], "messages[0].content[0].type"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "messages[0].content[0].type"),
        ([{"role": "user", "content": [{"type": "text", "text": None}]}], "messages[0].content[0].text"),
    ],
)
def test_malformed_messages_name_the_field(messages: list, field: str) -> None:
    with pytest.raises(BadInput) as caught:
        checked_messages(messages)
    assert caught.value.field == field


@pytest.mark.parametrize("template", ["{{ messages | length }}{{ enable_thinking }}"], indirect=True)
def test_variables(template: ChatTemplate) -> None:
    assert template.render([USER], variables={"enable_thinking": False}) == "1False"
    for name in ("messages", "add_generation_prompt", "no identifier"):
        with pytest.raises(BadInput, match="cannot be set"):
            template.render([USER], variables={name: 1})
    for value in (object(), 1 << 70, "\ud800"):
        with pytest.raises(BadInput, match="not plain JSON"):
            template.render([USER], variables={"enable_thinking": value})


# -- faulty and hostile templates --------------------------------------------------------------------------------------

DOUBLING = "{%% set ns = namespace(s=%s) %%}{%% for i in range(64) %%}{%% set ns.s = %s %%}{%% endfor %%}{{ ns.s }}"
FAULTS = {
    "a\n{% for %}": "line 2 of the chat template is faulty: Expected an expression",
    "{% if true %}": "line 1 of the chat template is faulty: Unexpected end of template",
    "a\n\n{{ nope.x }}": "line 3 of the chat template is faulty: 'nope' is undefined",
    "{% for m in messages %}\n{{ m.content + 1 }}{% endfor %}": "line 2 of the chat template is faulty: can only con",
    "{{ messages | nofilter }}": "line 1 of the chat template is faulty: No filter named 'nofilter'",
    "{{ ''.__class__.__mro__ }}": "access to attribute '__class__' of 'str' object is unsafe",
    "{{ cycler.__init__.__globals__.os }}": "is unsafe",
    "{{ namespace(__html__=1) }}": "a namespace cannot hold '__html__'",
    "{% set ns = namespace() %}{% set ns._x = 1 %}": "a namespace cannot hold '_x'",
    "{{ messages.append(1) }}": "is unsafe",
    "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}": "it is nested too deeply",
    "{% for m in messages recursive %}{{ loop(messages) }}{% endfor %}": "it is nested too deeply",
    "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}": "it is nested too deeply",
    "{% for i in range(10**9) %}{% endfor %}": "Range too big",
    "{% for i in range(99999) %}{{ 'y' * 1000 }}{% endfor %}": "it writes more than 16777216 characters",
}
ENDLESS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
BOMBS = {
    "nested loops": ENDLESS,
    "one huge string": "{{ 'x' * 10**12 }}",
    "a padded number": "{{ '%1000000000d' % 1 }}",
    "a power": "{{ 7 ** (7 ** 10) % 2 }}",
    "a doubling string": DOUBLING % ("'xxxxxxxx'", "ns.s ~ ns.s"),
    "a doubling list": DOUBLING % ("[1]", "[ns.s, ns.s]"),
    "a doubling sum": DOUBLING % ("[1]", "ns.s + ns.s"),
    "folded by the compiler": "{{ 'x' * 10**9 * 10 }}",
}


@pytest.mark.parametrize(("template", "sentence"), FAULTS.items(), ids=range(len(FAULTS)), indirect=["template"])
def test_a_faulty_template_is_one_sentence_with_the_line(template: ChatTemplate, sentence: str) -> None:
    with pytest.raises(ModelFileError) as caught:
        template.render([USER])
    assert sentence in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("template", BOMBS.values(), ids=BOMBS.keys(), indirect=True)
def test_a_bomb_is_ended(template: ChatTemplate) -> None:
    with pytest.raises(ModelFileError, match=r"runs for more than 1 s|more memory|writes more than"):
        template.render([USER])


@pytest.mark.parametrize("template", ["\n{{ raise_exception('roles must alternate') }}"], indirect=True)
def test_a_refusal_is_the_callers_mistake(template: ChatTemplate) -> None:
    with pytest.raises(BadInput, match="messages: line 2 of the chat template refuses them: roles must alternate"):
        template.render([USER])


@pytest.mark.parametrize("template", ["{% if messages | length > 1 %}" + ENDLESS + "{% endif %}ok"], indirect=True)
def test_a_bomb_harms_no_later_conversation(template: ChatTemplate) -> None:
    assert template.render([USER]) == "ok"
    with pytest.raises(ModelFileError):
        template.render([USER, USER])
    assert template.render([USER]) == "ok"


@pytest.mark.parametrize("template", ["{{ messages[0].content }}"], indirect=True)
def test_the_process_is_replaced_when_it_is_gone(template: ChatTemplate) -> None:
    assert template.render([{"role": "user", "content": "a"}]) == "a"
    template.close()
    assert template.render([{"role": "user", "content": "b"}]) == "b"
    assert template._process is not None
    template._process._child.kill()
    template._process._child.wait()
    assert template.render([{"role": "user", "content": "c"}]) == "c"


@pytest.mark.parametrize("template", ["{{ messages[0].content }}"], indirect=True)
def test_threads_get_their_own_answers(template: ChatTemplate) -> None:
    def ask(number: int) -> str:
        return template.render([{"role": "user", "content": str(number) * 1000}])

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(ask, range(100))) == [str(number) * 1000 for number in range(100)]


@pytest.mark.parametrize("template", ["{{ messages[0].content }}"], indirect=True)
def test_a_long_conversation_passes(template: ChatTemplate) -> None:
    text = "wörter " * 300_000
    assert template.render([{"role": "user", "content": text}]) == text
