"""A model that says what its prompt tells it to, behind the real engine loop and scheduler.

The executor reads a directive in the prompt's text: `say:TEXT` (then end-of-sequence), `count` (endless numbers),
`fail` (the row fails), `throw` (the step raises), `exit` (the process dies), `stall` (the step never ends).
Anything else is answered with a fixed text full of quotes, emoji and line separators, over and over.
"""

from __future__ import annotations

import os
import re
import struct
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from headway.core.clock import WallClock
from headway.core.events import EventLog
from headway.core.receipts import Receipts
from headway.core.request import SamplingParams
from headway.core.step import Capabilities, Seconds, StepPlan, StepResult, TokenLogprobs
from headway.engine.loop import EngineLoop
from headway.roofline.fixed import FixedCosts
from headway.scheduling.policies import policy_named
from headway.scheduling.scheduler import Scheduler
from headway.text.chat import Ending
from headway.text.tool_formats import format_of

EOS, IM_START, IM_END = 256, 257, 258
VOCAB = 260
SPECIAL = {EOS: b"<eos>", IM_START: b"<|im_start|>", IM_END: b"<|im_end|>", 259: b"<pad>"}
BABBLE = 'Größe "quoted" \\ back\n\tnaïve 日本語 🙂🚀 line\u2028sep\u2029 ok\x0b. '.encode()
CONTEXT = 4096


class ByteTokenizer:
    """One token per byte, and four special ones. Serves as the API's text side and as the engine's tokenizer."""

    vocab_size = VOCAB
    longest_token = 12
    knows_developer = False
    control_tokens = {"<|im_start|>": IM_START, "<|im_end|>": IM_END}  # noqa: RUF012
    template = "{{ tools }}"
    tool_format = format_of("")
    eos_ids = (EOS,)
    suffix = ()

    def load(self) -> None:
        pass

    def encode(self, text: str, add_special: bool = True) -> list[int]:
        ids: list[int] = []
        for piece in re.split(r"(<\|im_start\|>|<\|im_end\|>)", text):
            special = {"<|im_start|>": IM_START, "<|im_end|>": IM_END}.get(piece)
            ids += [special] if special else piece.encode()
        return ids

    def encode_whole(self, *texts: str) -> list[int]:
        return self.encode("".join(texts))

    def render(self, messages: Sequence[dict[str, Any]]) -> str:
        turns = "".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in messages)
        return f"{turns}<|im_start|>assistant\n"

    def encode_chat(
        self, messages: Sequence[dict[str, Any]], ending: Ending = Ending.NATURAL, **options: Any
    ) -> list[int]:
        return self.encode(self.render(messages))

    def decode(self, ids: Iterable[int], *, skip_special: bool = True) -> str:
        return b"".join(self.token_bytes(id, skip_special=skip_special) for id in ids).decode(errors="replace")

    def token_bytes(self, id: int, skip_special: bool = False) -> bytes:
        if id < 256:
            return bytes([id])
        return b"" if skip_special else SPECIAL[id]

    def whole_texts(self, skip_special: bool) -> dict[int, str]:
        return {}

    def strip_after(self, prompt: Sequence[int]) -> int:
        return 0


def script(prompt: Sequence[int]) -> tuple[str, bytes]:
    """(directive, what to say) of a prompt; b"" with "babble" and "count" is endless."""
    text = bytes(id if id < 256 else 0 for id in prompt)
    found = list(re.finditer(rb"\b(say):([^\x00]*)|\b(count|fail|throw|exit|stall)\b", text))
    if not found:
        return "babble", b""
    if found[-1].group(1):
        return "say", found[-1].group(2)
    return found[-1].group(3).decode(), b""


def logprobs(token: int, count: int) -> TokenLogprobs:
    """Made up, with the infinities that masks leave; the first alternative is the token itself."""
    others = [((token + 1 + i) % 256, float("-inf") if i % 2 else -2.5 - i) for i in range(count)]
    return TokenLogprobs(token, -0.25 - token / 1024, 1, ((token, -0.25 - token / 1024), *others)[:count])


class ScriptedExecutor:
    """Executes plans without a model. `seconds` is the length of a step."""

    def __init__(self, limits: Capabilities, seconds: float = 0.0) -> None:
        self._limits = limits
        self._seconds = seconds
        self.reset()

    def capabilities(self) -> Capabilities:
        return self._limits

    def reset(self) -> None:
        self._rows: dict[str, tuple[str, bytes, int, SamplingParams, list[int], int]] = {}
        self._done: dict[int, StepResult] = {}

    def close(self) -> None:
        self.reset()

    def submit(self, plan: StepPlan) -> int:
        for gone in plan.gone:
            del self._rows[gone]
        for row in plan.new:
            directive, text = script(row.tokens[: row.prompt_len])
            generated = len(row.tokens) - row.prompt_len
            self._rows[row.id] = (directive, text, row.choice, row.params, list(row.tokens), generated)
        if self._seconds and plan.work:
            time.sleep(self._seconds)
        result = StepResult(step=plan.step, seconds=Seconds(forward=self._seconds))
        for work in plan.work:
            directive, text, choice, params, tokens, generated = self._rows[work.id]
            if directive == "stall":
                time.sleep(1e6)
            if directive == "exit":
                os._exit(9)
            if directive == "throw":
                raise RuntimeError("a scripted fault")
            if directive == "fail" and generated >= 3:
                result.failed[work.id] = "a scripted failure"
                continue
            if work.prompt_logprobs:
                last = min(work.start + work.count + 1, len(tokens))
                ids = tokens[work.start + 1 : last]
                result.prompt_logprobs[work.id] = tuple(logprobs(id, params.prompt_logprobs or 0) for id in ids)
            if work.pool and work.start + work.count == len(tokens):
                result.pooled[work.id] = struct.pack("<3f", len(tokens), tokens[0], tokens[-1])
            if not work.sample:
                continue
            token = _next(directive, text, choice, generated)
            result.tokens[work.id] = (token,)
            if params.logprobs is not None:
                result.logprobs[work.id] = (logprobs(token, params.logprobs),)
            self._rows[work.id] = (directive, text, choice, params, tokens, generated + 1)
        self._done[plan.step] = result
        return plan.step

    def collect(self, ticket: int) -> StepResult:
        return self._done.pop(ticket)


def _next(directive: str, text: bytes, choice: int, generated: int) -> int:
    if directive == "say":
        return text[generated] if generated < len(text) else EOS
    if directive == "count":
        return b"0123456789"[(generated + choice) % 10]
    return BABBLE[(generated + 7 * choice) % len(BABBLE)]


def engine(
    *subscribers: Callable[[Any], None],
    blocks: int = 1024,
    block_size: int = 16,
    max_rows: int = 32,
    context: int = CONTEXT,
    seconds: float = 0.0,
    max_wait: float | None = None,
    policy: str = "chunked",
) -> EngineLoop:
    """The real loop and scheduler over a scripted executor."""
    limits = Capabilities(
        block_size=block_size,
        blocks=(blocks,),
        windows=(None,),
        max_rows=max_rows,
        max_tokens_per_step=512,
        max_model_len=context,
    )
    receipts = Receipts(FixedCosts(step=1.0, token=1.0).parts, limits.windows)
    log = EventLog(*subscribers, receipts)
    return EngineLoop(
        Scheduler(limits, key=b"k" * 32, policy=policy_named(policy), log=log, max_wait=max_wait),
        ScriptedExecutor(limits, seconds),
        WallClock(time.perf_counter_ns),
        VOCAB,
        ByteTokenizer(),  # type: ignore[arg-type]
        eos_ids=(EOS,),
        receipts=receipts,
    )
