"""The process in which grammars are tried before an engine gets them. Started by `grammar.GrammarChecker` as a script.

A grammar is somebody's program for a compiler in another language: some take minutes or gigabytes, and deep ones end
the process. Here that does no harm.

Arguments: file descriptor of a socket, processor seconds per grammar, bytes of memory. Messages on the socket are
MessagePack: first the ids of the model's control tokens by name, then (kind, source) of one `core.grammar.Grammar`
after another, each answered by (outcome, text): "ok" with llguidance's own form of it, or "refused" with why.
"""

from __future__ import annotations

import json
import os
import re
import resource
import signal
import sys
from multiprocessing.connection import Connection
from typing import Any

import msgspec
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from llguidance.gbnf_to_lark import any_to_lark

# Between two tokens of JSON: nothing, a space, or a new line and its indentation. A model that is unsure would go on
# with blanks for ever.
WHITESPACE = r"(\x20|\x0A\x20{0,40})?"
TRIED = 3  # tokens: a repetition of a repetition only shows its size behind the first one
FORMATS = {"date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"}  # asserted
STATES = 32768  # of its lexer, made while it is followed and kept: half a kilobyte each, 16 MiB at most


def limits() -> LLParserLimits:
    """What a grammar may take of llguidance. The fuel of the start is enough for a choice of the longest texts that one
    may hold, and two fifths of a second of processor time at most."""
    return LLParserLimits(initial_lexer_fuel=250_000, max_lexer_states=STATES, verbose_errors=False)


class GrammarFault(Exception):
    """The grammar is at fault."""


class ByteVocabulary:
    """The model's control tokens, and behind them every byte as a token: what a grammar allows needs no more."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, control: dict[str, int]) -> None:
        self._first = max(control.values(), default=-1) + 1
        self.tokens = [b""] * self._first + [bytes([byte]) for byte in range(256)] + [b"<|the end|>"]
        for name, id in control.items():
            self.tokens[id] = name.encode()
        self.eos_token_id = len(self.tokens) - 1
        self.special_token_ids = [*control.values(), self.eos_token_id]

    def __call__(self, text: str | bytes) -> list[int]:
        return [self._first + byte for byte in (text if isinstance(text, bytes) else text.encode())]


def literal(text: str) -> str:
    """A regular expression that only this text matches."""
    return "".join(letter if letter.isalnum() else f"\\x{{{ord(letter):x}}}" for letter in text)


def asserting(schema: Any) -> Any:
    """A schema without what asserts nothing and llguidance does not take: `uniqueItems: false`, and formats that it
    does not know, which are annotations by JSON Schema's own rule."""
    if isinstance(schema, list):
        return list(map(asserting, schema))
    if not isinstance(schema, dict):
        return schema
    return {
        key: value if key in ("enum", "const", "default", "examples") else asserting(value)
        for key, value in schema.items()
        if (key, value) != ("uniqueItems", False)
        and not (key == "format" and isinstance(value, str) and value not in FORMATS)
    }


def compiled(kind: str, source: str) -> str:
    """llguidance's form of a grammar."""
    if kind == "compiled":
        return source
    if kind == "json_schema":
        schema = json.loads(source)
        if isinstance(schema, bool):
            if not schema:
                raise GrammarFault("no JSON is valid by it")
            schema = {}
        if not isinstance(schema, dict):
            raise GrammarFault("a JSON schema is an object")
        return LLMatcher.grammar_from_json_schema(asserting(schema), overrides={"whitespace_pattern": WHITESPACE})
    if kind == "regex":
        return LLMatcher.grammar_from_regex(source)
    if kind == "choice":
        return LLMatcher.grammar_from_regex("|".join(map(literal, json.loads(source))))
    return LLMatcher.grammar_from_lark(any_to_lark(source))


def check(tokenizer: LLTokenizer, kind: str, source: str) -> str:
    """llguidance's form of a grammar, tried as far as its first tokens."""
    try:
        text = compiled(kind, source)
    except GrammarFault:
        raise
    except RecursionError:
        raise GrammarFault("it nests too deep") from None
    except Exception as error:  # of two parsers, in two languages
        raise GrammarFault(str(error)) from None
    matcher = LLMatcher(tokenizer, text, log_level=0, limits=limits())
    for number in range(TRIED):
        mask = matcher.compute_bitmask() if not matcher.is_error() else b""
        problem = matcher.get_error()
        if problem.startswith("NoExtension") or not (problem or any(mask)):
            raise GrammarFault("it begins texts that nothing ends" if number else "there is no text that it allows")
        if problem:
            raise GrammarFault(sentence(problem))
        matcher.consume_token(first_of(mask))
        if matcher.is_stopped() and not matcher.is_error():
            break
    return text


def first_of(mask: bytes) -> int:
    """The lowest id that is set in a mask of one bit each."""
    bits = int.from_bytes(mask, "little")
    return (bits & -bits).bit_length() - 1


def sentence(problem: str) -> str:
    """Of what a parser says in several lines, perhaps with a drawing of the place."""
    if "too many states" in problem:
        return (
            f"it takes more than the {STATES} states that one may have: shorten repetitions, as {{1,1000}}, and "
            "alternatives that look far ahead"
        )
    lines = problem.strip().splitlines() or ["it cannot be compiled"]
    why = next((line for line in lines if line.startswith("error:")), "")
    shown = re.sub(r"(Pointer ['\"`])/", r"\1#/", lines[0])  # as schemas write them
    return (shown + (" " + why if why else ""))[:400]


def serve(connection: Connection, seconds: float) -> None:
    """Answer until the other side goes away."""
    tokenizer = LLTokenizer(ByteVocabulary(msgspec.msgpack.decode(connection.recv_bytes())), slices=[])  # type: ignore[arg-type]
    while True:
        try:
            kind, source = msgspec.msgpack.decode(connection.recv_bytes())
        except EOFError:
            return
        signal.setitimer(signal.ITIMER_PROF, seconds)  # its signal ends the process
        try:
            answer = "ok", check(tokenizer, kind, source)
        except GrammarFault as error:
            answer = "refused", sentence(str(error))
        signal.setitimer(signal.ITIMER_PROF, 0)
        connection.send_bytes(msgspec.msgpack.encode(answer))


def main() -> None:
    descriptor, seconds, memory = sys.argv[1:]
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if sys.platform == "linux":  # elsewhere the system does not enforce it; the time limit bounds memory too
        resource.setrlimit(resource.RLIMIT_AS, (int(memory), int(memory)))
    os.nice(10)  # the engine goes first
    serve(Connection(int(descriptor)), float(seconds))


if __name__ == "__main__":
    main()
