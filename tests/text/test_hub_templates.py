"""Chat templates as their makers publish them, rendered as transformers' `apply_chat_template` renders them."""

from __future__ import annotations

import json
from typing import Any

import pytest
import tokenizers
from transformers import PreTrainedTokenizerFast

from headway.core.errors import BadInput, ModelFileError
from headway.text.template import ChatTemplate
from tests.published import tokenizer_folder

USER: dict[str, Any] = {"role": "user", "content": " How warm is it in Zürich, 'now' & <soon>?\n"}
SYSTEM = {"role": "system", "content": "Be brief.\n"}
THOUGHT = {"role": "assistant", "content": "<think>\nhm\n</think>\n\n21 °C."}
CALLED = {"function": {"name": "weather", "arguments": {"place": "Zürich", "days": [1, 2]}}, "type": "function"}
CALL = {"role": "assistant", "content": "", "tool_calls": [CALLED]}
RESULT = {"role": "tool", "content": '{"celsius": 21}', "name": "weather"}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "The weather somewhere, 'today' & <later>",
            "parameters": {
                "type": "object",
                "properties": {"place": {"type": "string"}, "days": {"type": "array", "items": {"type": "integer"}}},
                "required": ["place"],
            },
        },
    }
]
CONVERSATIONS: dict[str, list[dict[str, Any]]] = {
    "one turn": [USER],
    "system": [SYSTEM, USER],
    "a thought": [USER, THOUGHT, {"role": "user", "content": "And in Bern? 🎉"}],
    "an answer last": [SYSTEM, USER, THOUGHT],
    "a call": [USER, CALL],
    "a call and its result": [SYSTEM, USER, CALL, RESULT],
    "two results and an answer": [USER, CALL, RESULT, RESULT, THOUGHT, USER],
    "no alternation": [USER, USER],
}


def text_of(token: Any) -> str | None:
    return token.get("content") if isinstance(token, dict) else token


@pytest.mark.parametrize("name", ["qwen3", "llama3", "llama3_1", "gemma3", "deepseek_v3"])
def test_a_published_template_is_rendered_as_transformers_renders_it(name: str) -> None:
    """gpt-oss publishes its template elsewhere, and Llama 2 none."""
    config = json.loads((tokenizer_folder(name) / "tokenizer_config.json").read_text())
    named = {key: text_of(config.get(key)) for key in ("bos_token", "eos_token", "pad_token", "unk_token")}
    tokens = {key: text for key, text in named.items() if text is not None}
    bare = tokenizers.Tokenizer(tokenizers.models.BPE())
    theirs = PreTrainedTokenizerFast(tokenizer_object=bare, chat_template=config["chat_template"], **tokens)
    ours = ChatTemplate(config["chat_template"], tokens)
    rendered = 0
    for about, messages in CONVERSATIONS.items():
        for tools in (None, TOOLS):
            for prompt in (True, False):
                options: dict[str, Any] = {"tools": tools, "add_generation_prompt": prompt}
                try:
                    expected = theirs.apply_chat_template(messages, tokenize=False, **options)
                except Exception as error:  # the template refuses: here it does so in the same words
                    with pytest.raises((BadInput, ModelFileError)) as caught:
                        ours.render(messages, **options)
                    assert str(error) in str(caught.value), about
                else:
                    assert ours.render(messages, **options) == expected, (about, options)
                    rendered += 1
    if name == "qwen3":
        options = {"tools": TOOLS, "add_generation_prompt": True}
        quiet = theirs.apply_chat_template([USER], tokenize=False, enable_thinking=False, **options)
        assert ours.render([USER], variables={"enable_thinking": False}, **options) == quiet
        assert "weather" in quiet and "<think>\n\n</think>" in quiet
    ours.close()
    assert rendered >= 8
