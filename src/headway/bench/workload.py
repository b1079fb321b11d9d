"""What is sent: prompts of a wanted length in the *endpoint's* tokens, traces, data sets.

No tokenizer is loaded. Prompts are built of short common English words, nearly always one token each, and the
endpoint's own `usage.prompt_tokens` of two short and one long request tells the tokens per word and the template's
overhead. Afterwards every answer's `prompt_tokens` is held against what was wanted.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass

from headway.bench.client import BenchClient
from headway.bench.dialects import Prompt
from headway.bench.transport import ExchangeFailed
from headway.metrics.records import FailureKind, RequestRecord
from headway.traffic.traces import TraceRow

COMMON = (
    "time year people way day man thing woman life child world school state family student group country problem "
    "hand part place case week company system program question work government number night point home water room "
    "mother area money story fact month lot right study book eye job word business issue side kind head house "
    "service friend father power hour game line end member law car city community name president team minute idea "
    "body information back parent face others level office door health person art war history party result change "
    "morning reason research girl guy moment air teacher force education"
)
WORDS = tuple(COMMON.split())
MEASURED = (20, 40, 220)  # words of the first contact's prompts
TOLERANCE = 0.05  # a prompt is as wanted if it is within this share, or two tokens


@dataclass(frozen=True)
class WorkItem:
    """One request to be sent.

    Attributes:
        prompt: its text, or its messages.
        max_tokens: limit on the answer.
        wanted: prompt tokens it should have; 0 = whatever it has.
        at: arrival, seconds from the start; None = the load decides.
    """

    prompt: Prompt
    max_tokens: int
    wanted: int = 0
    at: float | None = None


@dataclass(frozen=True)
class Measure:
    """How many prompt tokens the endpoint makes of a text: overhead + per_word * words."""

    overhead: float = 0.0
    per_word: float = 1.0
    known: bool = False

    def words(self, tokens: int) -> int:
        return max(1, round((tokens - self.overhead) / self.per_word))


def words(count: int, noise: random.Random) -> str:
    return " ".join(noise.choices(WORDS, k=count))


def measure_texts(seed: int) -> list[str]:
    """The prompts of `measure_prompts`."""
    noise = random.Random(f"measure {seed}")
    return [words(count, noise) for count in MEASURED]


async def measure_prompts(client: BenchClient, seed: int) -> tuple[Measure, list[RequestRecord]]:
    """Ask the endpoint three times for one token, with prompts of 20, 40 and 220 words, and fit a line.

    Returns the line, and what was received: a failure there is the first thing a user should hear of.
    """
    points, records = [], []
    for count, prompt in zip(MEASURED, measure_texts(seed), strict=True):
        record = RequestRecord(
            index=-1, intended=time.perf_counter_ns(), max_tokens=1, prompt_bytes=len(prompt), warmup=True
        )
        await client.send(client.encode(prompt, 1), record)
        records.append(record)
        answered = record.failure is None or record.failure.kind is FailureKind.EMPTY
        if answered and record.prompt_tokens is None:
            record.prompt_tokens = await whole_count(client, prompt)
        if answered and record.prompt_tokens is not None:
            points.append((count, record.prompt_tokens))
        elif not record.chunks:
            break  # it does not answer: two more silences would tell nothing new
    if len(points) < 3 or points[-1][1] <= points[0][1]:
        return Measure(), records
    (few, low), (many, high) = points[0], points[-1]
    per_word = (high - low) / (many - few)
    return Measure(low - per_word * few, per_word, known=True), records


async def whole_count(client: BenchClient, prompt: str) -> int | None:
    """prompt_tokens of an answer that is not streamed, None if that fails too."""
    try:
        return await client.count_prompt(prompt)
    except ExchangeFailed:
        return None


class Prompts:
    """Builds prompts; equal seeds build equal prompts."""

    def __init__(self, measure: Measure, seed: int) -> None:
        self._measure = measure
        self._seed = seed

    def unique(self, index: int, tokens: int) -> str:
        """A prompt of about `tokens` tokens that shares no prefix with another index's."""
        noise = random.Random(f"prompt {self._seed} {index}")
        return words(self._measure.words(tokens), noise)

    def after_prefix(self, index: int, tokens: int, shared: int) -> str:
        """A prompt whose first `shared` tokens are the same for every index."""
        total = self._measure.words(tokens)
        common = min(total, round(shared / self._measure.per_word))
        head = words(common, random.Random(f"prefix {self._seed}"))
        tail = words(total - common, random.Random(f"prompt {self._seed} {index}"))
        return f"{head} {tail}".strip()

    def of_trace(self, index: int, row: TraceRow) -> str:
        """A prompt with a trace row's length, in which equal block ids are equal text at equal places."""
        if not row.blocks:
            return self.unique(index, row.input_tokens)
        total = self._measure.words(row.input_tokens)
        block = max(1, round(row.block_tokens / self._measure.per_word))
        parts, left = [], total
        for number in row.blocks:
            if left <= 0:
                break
            text = words(block, random.Random(f"block {self._seed} {number}")).split(" ")[:left]
            parts += text
            left -= len(text)
        if left > 0:
            parts.append(words(left, random.Random(f"prompt {self._seed} {index}")))
        return " ".join(parts)


def check_prompts(records: Sequence[RequestRecord], measure: Measure) -> dict[str, object]:
    """Wanted against counted prompt tokens: {"verified", "wanted", "counted", "off", "checked", "reason"}.

    `verified` is null where there is nothing to hold them against.
    """
    targets = [r for r in records if r.prompt_wanted]
    checked = [r for r in targets if r.prompt_tokens is not None]
    off = sum(abs(_counted(r) - r.prompt_wanted) > max(2.0, TOLERANCE * r.prompt_wanted) for r in checked)
    reason = None
    if not targets:
        reason = "the workload has no target length"
    elif not checked:
        reason = "the endpoint reported no prompt_tokens"
    elif off and not measure.known:
        reason = "the endpoint's prompt_tokens do not grow with the prompt, so lengths could not be set"
    elif off:
        reason = f"{off} of {len(checked)} prompts are more than {TOLERANCE:.0%} from the wanted length"
    return {
        "verified": reason is None if targets else None,
        "wanted": sum(r.prompt_wanted for r in checked),
        "counted": sum(_counted(r) for r in checked),
        "off": off,
        "checked": len(checked),
        "reason": reason,
    }


def _counted(record: RequestRecord) -> int:
    assert record.prompt_tokens is not None
    return record.prompt_tokens
