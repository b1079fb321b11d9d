"""A file of prompts in, a file of completions out, resumable: the second half of `headway generate`."""

from __future__ import annotations

import codecs
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from headway.core.errors import BadInput, HeadwayError
from headway.core.request import SamplingParams
from headway.engine.llm import LLM
from headway.engine.results import Completion

JobId = str | int
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
        total: jobs in the input; `total - len(todo)` were already in the output.
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
        done = _finished(output)
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


def _finished(output: Path) -> set[JobId]:
    """Ids in the output. A last line without its end (the run was killed while writing) is cut off."""
    if not os.path.isfile(output):  # new, or a pipe or device, which keeps nothing
        return set()
    data = output.read_bytes()
    whole = data.rfind(b"\n") + 1
    rest = data[whole:]
    try:
        done = {msgspec.json.decode(line)["id"] for line in data[:whole].splitlines() if line.strip()}
        if rest[: len(LINE_START)] != LINE_START[: len(rest)]:
            raise TypeError("not the start of a line of ours")
    except (msgspec.DecodeError, KeyError, TypeError):
        raise BadInput("--output", f"{output} exists and is not the output of an earlier run") from None
    if rest:
        os.truncate(output, whole)
    return done


def run(llm: LLM, jobs: Jobs) -> None:
    """Do what is left, appending each result as it is done, with a progress bar on stderr."""
    from rich.progress import Progress

    from headway.cli.terminal import stderr

    requests = ((job.id, job.prompt, job.params) for job in jobs.todo)
    with jobs.output.open("ab") as file, Progress(console=stderr) as bars:
        task = bars.add_task("prompts", total=jobs.total, completed=jobs.total - len(jobs.todo))
        for id, result in llm.as_completed(requests):
            file.write(encode(id, result) + b"\n")
            file.flush()
            bars.advance(task)


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
