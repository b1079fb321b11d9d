"""A file of prompts in, a file of completions out, resumable: the second half of `headway generate`."""

from __future__ import annotations

import codecs
import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from headway.core.errors import BadInput, HeadwayError
from headway.core.request import SamplingParams
from headway.engine.llm import LLM
from headway.engine.results import Completion

JobId = str | int
FAILED = ("error", "abort")  # ends of a generation that is not complete
LINE_START = b'{"id":'  # of every line of the output, see `encode`
SAMPLING = frozenset(SamplingParams.__struct_fields__)


@dataclass(frozen=True)
class Job:
    id: JobId
    prompt: Any  # text, token ids, or messages
    params: SamplingParams


@dataclass(frozen=True)
class Jobs:
    """What is left to do, and where the results go.

    Attributes:
        total: jobs in the input; `total - len(todo)` were already answered in the output.
    """

    todo: list[Job]
    total: int
    output: Path


def open_jobs(input: Path, output: Path, defaults: SamplingParams) -> Jobs:
    """Read and check the whole input, and take out what the output already holds.

    Raises:
        BadInput: a line is not a job, an id comes twice, or a file cannot be read or written.
    """
    try:
        lines = input.read_bytes().removeprefix(codecs.BOM_UTF8).splitlines()
    except OSError as error:
        raise BadInput("--input", f"{input}: {error.strerror}") from None
    jobs = [_job(line, number, defaults) for number, line in enumerate(lines, 1) if line.strip()]
    seen: set[JobId] = set()
    for job in jobs:
        if job.id in seen:
            raise BadInput("--input", f"id {job.id!r} comes twice; ids must be unique (default: the line number)")
        seen.add(job.id)
    try:
        done = _finished(output, seen)
        output.open("ab").close()
    except OSError as error:
        raise BadInput("--output", f"{output}: {error.strerror}") from None
    return Jobs([job for job in jobs if job.id not in done], len(jobs), output)


def _job(line: bytes, number: int, defaults: SamplingParams) -> Job:
    where = f"--input line {number}"
    try:
        fields = msgspec.json.decode(line, type=dict[str, Any])
    except msgspec.DecodeError as error:
        raise BadInput(where, f"not a JSON object ({error})") from None
    prompts = [name for name in ("prompt", "messages") if name in fields]
    unknown = fields.keys() - SAMPLING - {"id", "prompt", "messages"}
    if len(prompts) != 1 or unknown:
        raise BadInput(where, f'needs "prompt" or "messages"; unknown fields: {", ".join(sorted(unknown)) or "none"}')
    id = fields.get("id", number)
    if not isinstance(id, str | int) or isinstance(id, bool):
        raise BadInput(where, "id must be a string or an integer")
    prompt = fields[prompts[0]]
    if not (prompts == ["prompt"] and isinstance(prompt, str)):
        kind: type = dict if prompts == ["messages"] else int
        if not isinstance(prompt, list) or not prompt or not all(isinstance(one, kind) for one in prompt):
            raise BadInput(where, '"prompt" is a text or a list of token ids, "messages" a list of messages')
    settings = msgspec.to_builtins(defaults) | {name: fields[name] for name in fields.keys() & SAMPLING}
    try:
        return Job(id, prompt, msgspec.convert(settings, SamplingParams))
    except (msgspec.ValidationError, BadInput) as error:
        raise BadInput(where, str(error)) from None


class _Choice(msgspec.Struct):
    finish_reason: str | None = None


class _Line(_Choice, kw_only=True):
    """What of a line of the output says whether its job is done."""

    id: JobId
    error: str | None = None
    choices: tuple[_Choice, ...] = ()

    @property
    def failed(self) -> bool:
        ends = {choice.finish_reason for choice in (self, *self.choices)}
        return self.error is not None or not ends.isdisjoint(FAILED)


def _finished(output: Path, ids: set[JobId]) -> set[JobId]:
    """Ids in the output. Lines of jobs in `ids` that failed are taken out, to be tried again, and so is a last line
    without its end (the run was killed while writing)."""
    if not os.path.isfile(output):  # new, or a pipe or device, which keeps nothing
        return set()
    data = output.read_bytes()
    whole = data.rfind(b"\n") + 1
    rest = data[whole:]
    texts = [text for text in data[:whole].splitlines() if text.strip()]
    try:
        lines = [msgspec.json.decode(text, type=_Line) for text in texts]
        if rest[: len(LINE_START)] != LINE_START[: len(rest)]:
            raise TypeError("not the start of a line of ours")
    except (msgspec.DecodeError, TypeError):
        raise BadInput("--output", f"{output} exists and is not the output of an earlier run") from None
    kept = [index for index, line in enumerate(lines) if not (line.failed and line.id in ids)]
    if len(kept) < len(lines):
        _replace(output, b"".join(texts[index] + b"\n" for index in kept))
    elif rest:
        os.truncate(output, whole)
    return {lines[index].id for index in kept}


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


def run(llm: LLM, jobs: Jobs) -> int:
    """Do what is left, appending each result as it is done, with progress on stderr -> how many failed."""
    from headway.cli.terminal import progress

    failed = 0
    requests = ((job.id, job.prompt, job.params) for job in jobs.todo)
    with jobs.output.open("ab") as file, progress() as report:
        already = jobs.total - len(jobs.todo)
        report("prompts", already, jobs.total)
        for done, (id, result) in enumerate(llm.as_completed(requests), already + 1):
            line = encode(id, result)
            failed += msgspec.json.decode(line, type=_Line).failed
            file.write(line + b"\n")
            file.flush()
            report("prompts", done, jobs.total)
    return failed


def encode(id: JobId | None, result: Completion | HeadwayError) -> bytes:
    """One line of the output."""
    if isinstance(result, HeadwayError):
        return msgspec.json.encode({"id": id, "error": str(result)})
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
    return msgspec.json.encode(
        {
            **({} if id is None else {"id": id}),
            **choices[0],
            **({"choices": choices} if len(choices) > 1 else {}),
            **({"prompt_logprobs": result.prompt_logprobs} if result.prompt_logprobs else {}),
            "prompt_tokens": result.prompt_tokens,
            "cached_tokens": result.cached_tokens,
            "ttft_ms": first.ttft and first.ttft * 1000,
            "tpot_ms": first.tpot and first.tpot * 1000,
        }
    )
