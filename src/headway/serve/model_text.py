"""The text side of a real checkpoint, read from its headers: no weight is loaded into the API process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from headway.core.errors import BadInput
from headway.model.load import ModelInfo
from headway.model.source import merges_folder
from headway.text.aside import step_back
from headway.text.chat import Ending, encode_chat
from headway.text.template import ChatTemplate
from headway.text.tokenizer import Tokenizer
from headway.text.tool_formats import format_of, named


class ModelText:
    """A checkpoint's tokenizer and chat template, as `serve.text.Text`.

    Args:
        tool_parser: name of the format in which the model calls tools; None = the one its template goes with.

    Raises:
        ModelFileError: the tokenizer is missing, damaged, or of an unsupported kind.
    """

    def __init__(self, info: ModelInfo, tool_parser: str | None = None) -> None:
        self._name = info.name
        # Long texts are encoded by threads that step back for the engine. They hold Python's lock for an instant only:
        # a thread of low priority that held it longer would keep the event loop, which waits for it, from running.
        self._aside = ThreadPoolExecutor(2, thread_name_prefix="encode", initializer=step_back)
        self._tokenizer = Tokenizer(info.tokenizer, self._aside, merges_folder())
        self._tokenizer.encode("")  # finds what is damaged
        source = info.tokenizer.chat_template
        self._template = None if source is None else ChatTemplate(source, self._tokenizer.template_tokens())
        self.vocab_size = self._tokenizer.vocab_size
        self.knows_developer = source is not None and "developer" in source
        self.control_tokens: Mapping[str, int] = self._tokenizer.special_ids
        self.template = source or ""
        self.tool_format = format_of(self.template) if tool_parser is None else named(tool_parser)
        if "tools" not in self.template and self.tool_format.name != "hermes":
            problem = (
                "the chat template knows no tools, so the model is told of them in hermes' words; accepted: hermes"
            )
            raise BadInput("--tool-parser", f"{tool_parser!r}: {problem}")
        self.longest_token = self._tokenizer.longest()
        self.suffix: Sequence[int] = self._tokenizer.suffix

    def load(self) -> None:
        self._tokenizer.load()

    def encode(self, text: str, add_special: bool = True) -> list[int]:
        return self._tokenizer.encode(text, add_special=add_special)

    def encode_whole(self, *texts: str) -> list[int]:
        return self._tokenizer.encode_whole(*texts)

    def encode_chat(self, messages: Sequence[dict[str, Any]], ending: Ending, **options: Any) -> list[int]:
        if self._template is None:
            raise BadInput("messages", f"{self._name} has no chat template; use /v1/completions")
        return encode_chat(self._template, self._tokenizer, messages, ending, **options)

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        return self._tokenizer.decode(ids, skip_special=skip_special)

    def strip_after(self, prompt: Sequence[int]) -> int:
        return self._tokenizer.strip_after(prompt)

    def token_bytes(self, id: int, skip_special: bool = False) -> bytes:
        return self._tokenizer.token_bytes(id, skip_special=skip_special)
