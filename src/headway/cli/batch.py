"""A file of prompts in, a file of completions out, resumable: `headway generate --input`."""

from __future__ import annotations

import codecs
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from headway.core.errors import BadInput, HeadwayError
from headway.core.request import SamplingParams
from headway.engine.llm import LLM
from headway.engine.results import Completion

LineId = str | int
FAILED = ("error", "abort")  # ends of a generation that is not complete
LINE_START = b'{"id":'  # of every line of the output, see `encode`
STANDARD = Path("-")  # stdin, or stdout
SAMPLING = frozenset(SamplingParams.__struct_fields__)


@dataclass(frozen=True)
class BatchLine:
    """A line of the input."""

    id: LineId
    prompt: Any  # text, token ids, or messages
    given: dict[str, Any]  # fields of SamplingParams
    body: Any = None  # of a line of OpenAI's batches


@dataclass(frozen=True)
class Batch:
    """What is left to do, and where the results go.

    Attributes:
        total: lines of the input; `total - len(todo)` were already answered in the output.
    """

    todo: list[BatchLine]
    total: int
    output: Path


def open_batch(input: Path, output: Path, given: dict[str, Any]) -> Batch:
    """Read and check the whole input (`-` is stdin), and take out what the output already holds.

    Raises:
        BadInput: a line is not a request, an id comes twice, or a file cannot be read or written.
    """
    try:
        data = sys.stdin.buffer.read() if input == STANDARD else input.read_bytes()
    except OSError as error:
        raise BadInput("--input", f"{input}: {error.strerror}") from None
    texts = data.removeprefix(codecs.BOM_UTF8).split(b"\n")
    lines = [_line(text, number, given) for number, text in enumerate(texts, 1) if text.strip()]
    if not lines:
        raise BadInput("--input", f"{input} holds no line; give one JSON object a line")
    seen: set[LineId] = set()
    for line in lines:
        if line.id in seen:
            raise BadInput("--input", f"id {line.id!r} comes twice; ids must be unique (default: the line number)")
        seen.add(line.id)
    try:
        done = _finished(output, seen)
        output.open("ab").close()
    except OSError as error:
        raise BadInput("--output", f"{output}: {error.strerror}") from None
    return Batch([line for line in lines if line.id not in done], len(lines), output)


def _line(text: bytes, number: int, given: dict[str, Any]) -> BatchLine:
    where = f"--input line {number}"
    try:
        fields = msgspec.json.decode(text, type=dict[str, Any])
    except msgspec.DecodeError as error:
        raise BadInput(where, f"not a JSON object ({error})") from None
    id = fields.get("custom_id", fields.get("id", number))
    if not isinstance(id, str | int) or isinstance(id, bool):
        raise BadInput(where, "id must be a string or an integer")
    try:
        prompt, own, body = _openai(fields) if "custom_id" in fields else (*_own(fields), None)
        checked = msgspec.convert(given | own, SamplingParams)
    except (msgspec.ValidationError, HeadwayError) as error:
        raise BadInput(where, str(error)) from None
    return BatchLine(id, prompt, {name: getattr(checked, name) for name in given | own}, body)


def _own(fields: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """-> prompt, and the sampling parameters that the line names."""
    prompts = [name for name in ("prompt", "messages") if name in fields]
    unknown = fields.keys() - SAMPLING - {"id", "prompt", "messages"}
    if len(prompts) != 1 or unknown:
        listed = ", ".join(sorted(unknown)) or "none"
        raise HeadwayError(f'needs "prompt" or "messages"; unknown fields: {listed}')
    prompt = fields[prompts[0]]
    if not (prompts == ["prompt"] and isinstance(prompt, str)):
        kind: type = dict if prompts == ["messages"] else int
        if not isinstance(prompt, list) or not prompt or not all(isinstance(one, kind) for one in prompt):
            raise HeadwayError('"prompt" is a text or a list of token ids, "messages" a list of messages')
    return prompt, {name: fields[name] for name in fields.keys() & SAMPLING}


def _openai(fields: dict[str, Any]) -> tuple[Any, dict[str, Any], Any]:
    from headway.cli.openai_batch import read

    return read(fields)


class _Choice(msgspec.Struct):
    finish_reason: str | None = None


class _Body(msgspec.Struct):
    choices: tuple[_Choice, ...] = ()


class _Response(msgspec.Struct):
    status_code: int
    body: _Body


class _Line(_Choice, kw_only=True):
    """What of a line of the output says whether its request is done."""

    id: LineId
    custom_id: LineId | None = None  # of a line as OpenAI's batches have it, with its response
    response: _Response | None = None
    error: str | None = None
    choices: tuple[_Choice, ...] = ()

    @property
    def key(self) -> LineId:
        return self.id if self.custom_id is None else self.custom_id

    @property
    def failed(self) -> bool:
        ends = {
            choice.finish_reason
            for choice in (self, *self.choices, *(self.response.body.choices if self.response else ()))
        }
        refused = self.response is not None and self.response.status_code != 200
        return self.error is not None or refused or not ends.isdisjoint(FAILED)


def _finished(output: Path, ids: set[LineId]) -> set[LineId]:
    """Ids in the output. Lines of `ids` that failed are taken out, to be tried again, and so is a last line
    without its end (the run was killed while writing)."""
    if not os.path.isfile(output):  # new, or a pipe or device, which keeps nothing
        return set()
    data = output.read_bytes()
    whole = data.rfind(b"\n") + 1
    rest = data[whole:]
    texts = [text for text in data[:whole].split(b"\n") if text.strip()]
    try:
        lines = [msgspec.json.decode(text, type=_Line) for text in texts]
        if rest[: len(LINE_START)] != LINE_START[: len(rest)]:
            raise TypeError("not the start of a line of ours")
    except (msgspec.DecodeError, TypeError):
        raise BadInput("--output", f"{output} exists and is not the output of an earlier run") from None
    kept = [index for index, line in enumerate(lines) if not (line.failed and line.key in ids)]
    if len(kept) < len(lines):
        _replace(output, b"".join(texts[index] + b"\n" for index in kept))
    elif rest:
        os.truncate(output, whole)
    return {lines[index].key for index in kept}


def _replace(path: Path, data: bytes) -> None:
    """New content for a file: all of it, or none."""
    path = path.resolve()
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}-", delete=False) as file:
        try:
            file.write(data)
            file.flush()
            shutil.copymode(path, file.name)
            os.replace(file.name, path)
        except BaseException:
            os.unlink(file.name)
            raise


def run(llm: LLM, batch: Batch, adapter: str = "") -> int:
    """Do what is left with a LoRA adapter, or none, appending each result as it is done, with progress on stderr -> how
    many failed."""
    from headway.cli.terminal import note, stderr
    from headway.engine.progress import batch_bar

    done, failed = batch.total - len(batch.todo), 0
    requests = ((line.id, line.prompt, llm.params(**line.given)) for line in batch.todo)
    bodies = {line.id: line.body for line in batch.todo if line.body is not None}
    answers = _answers(llm) if bodies else None
    began, before = time.monotonic(), llm.generated
    bar = batch_bar(stderr, batch.total, done, lambda: llm.generated) if stderr.is_terminal else plain_bar(batch, done)
    try:
        with batch.output.open("ab") as file, bar as report:
            for id, result in llm.as_completed(requests, adapter=adapter):
                line = (
                    encode(id, result)
                    if answers is None or id not in bodies
                    else answers.encode(id, bodies[id], result)
                )
                file.write(line + b"\n")
                file.flush()
                done += 1
                failed += msgspec.json.decode(line, type=_Line).failed
                report(done)
    except KeyboardInterrupt:
        note(f"stopped: {done - failed} of {batch.total} answers are in {batch.output}; run this again for the others")
        raise
    rate = (llm.generated - before) / max(time.monotonic() - began, 1e-9)
    note(f"{done - failed} answered, {failed} failed, {rate:,.0f} tokens/s")
    return failed


def _answers(llm: LLM) -> Any:
    from headway.cli.openai_batch import BatchAnswers

    return BatchAnswers(llm)


@contextmanager
def plain_bar(batch: Batch, done: int) -> Iterator[Callable[[int], None]]:
    """Progress where there is no terminal: a line now and then."""
    from headway.cli.terminal import stderr
    from headway.report.progress import PlainProgress

    report = PlainProgress(stderr)
    report("prompts", done, batch.total)
    yield lambda now: report("prompts", now, batch.total)


def encode(id: LineId | None, result: Completion | HeadwayError) -> bytes:
    """One line of the output; no line splitter finds more than one in it."""
    from headway.serve.encode import json_bytes

    if isinstance(result, HeadwayError):
        return json_bytes({"id": id, "error": str(result)})
    choices = [
        {
            "text": choice.text,
            "tokens": choice.tokens,
            "finish_reason": choice.finish.reason if choice.finish else None,
            **({"logprobs": choice.logprobs} if choice.logprobs else {}),
        }
        for choice in result.choices
    ]
    first = result.choices[0]
    return json_bytes(
        {
            **({} if id is None else {"id": id}),
            **choices[0],
            **({"choices": choices} if len(choices) > 1 else {}),
            **({"prompt_logprobs": result.prompt_logprobs} if result.prompt_logprobs else {}),
            "prompt_tokens": result.prompt_tokens,
            "cached_tokens": result.cached_tokens,
            "ttft_ms": first.ttft and round(first.ttft * 1000, 3),
            "tpot_ms": first.tpot and round(first.tpot * 1000, 3),
        }
    )
