"""Requests that Headway serves on a measured machine: a closed loop over the steps timed there.

Prompts are computed in chunks beside the decodes, as large as the step budget lets them be, one prompt after another;
so n requests in flight go round between a queue and a delay:

    S = chunks of a prompt x seconds of a step with one        the queue's service; longer chunks where nobody decodes
    D = T_out ((1 - u) decode + u mixed)                       the delay; u: share of the time with a prompt in work
    R = S (1 + others queued - what is done of the one in work)    TTFT, by mean value analysis (Schweitzer)

`headway simulate` plays the same load through the scheduler itself, step by step.
"""

from __future__ import annotations

import msgspec

from headway.core.step import StepShape
from headway.engine.options import EngineOptions
from headway.engine.warmup import usual_budget
from headway.roofline.deployment import Deployment
from headway.roofline.step import StepTime, decode_step, mixed_step, prefill_step
from headway.roofline.timing import Timing

ROUNDS = 60  # of the fixed point; halved steps, so it settles long before
OURS = EngineOptions()


class MeasuredLoad(msgspec.Struct, frozen=True):
    """Seconds, in the mean: to the first token and per token after it; of a step of decodes alone, of one with a chunk
    beside, and what prompts add to a token. `batch`: requests decoding; `chunk`: prompt tokens of a step."""

    ttft: float
    tpot: float
    decode: float
    mixed: float
    batch: float
    chunk: int

    @property
    def prompts(self) -> float:
        return self.tpot - self.decode


class ClosedLoop(msgspec.Struct, frozen=True):
    """Equal requests, as many always in flight, on one engine with its default settings.

    Attributes:
        model: seconds of its steps.
        prompt, output: tokens of a request. cached: of the prompt, found in the prefix cache.
        rows: requests that it holds at most.
        slowness: how much longer than predicted most steps take, which the scheduler allows for.
    """

    model: StepTime
    prompt: int
    output: int
    rows: float
    cached: int = 0
    slowness: float = 1.0

    @property
    def fresh(self) -> int:
        """Prompt tokens to compute."""
        return max(1, self.prompt - self.cached)

    def at(self, flying: float) -> MeasuredLoad:
        """With so many requests in flight."""
        held = max(1.0, min(flying, self.rows))
        alone = self._prompt(*self._chunk(None))
        batch, nobody = held, 1.0 if held == 1 else 0.0
        for _ in range(ROUNDS):
            load, life = self._round(held, batch, nobody, alone)
            share = life / (load.ttft + life)
            nobody = (nobody + (1 - share) ** (held - 1)) / 2  # else decodes beside a prompt
            batch = (batch + max(1.0, held * share)) / 2
        waits = (flying - held) / held * (load.ttft + self.output * load.tpot)  # for others to end
        return msgspec.structs.replace(load, ttft=load.ttft + waits)

    def _round(self, held: float, batch: float, nobody: float, alone: float) -> tuple[MeasuredLoad, float]:
        """One turn of the fixed point: the load if `batch` decode, but nobody with some probability, and the seconds
        that a request then decodes."""
        decodes = decode_step(self.model.shape, batch, self.prompt + self.output / 2)
        decode = self.model.predict(decodes)
        chunk, mixed = self._chunk(decodes)
        beside = self._prompt(chunk, mixed)
        service = nobody * alone + (1 - nobody) * beside
        life = self.output * decode
        waiting = service
        for _ in range(ROUNDS):
            others = (held - 1) / (waiting + life)  # arrivals per second that one request sees
            queued, busy = others * waiting, min(1.0, others * service)
            waiting += (service * (1 + max(0.0, queued - busy / 2)) - waiting) / 2
            mixing = min(1.0, others * beside)  # of a decoding request's time
            token = (1 - mixing) * decode + mixing * mixed
            life = self.output * token
        return MeasuredLoad(waiting, token, decode, mixed, batch, chunk), life

    def _prompt(self, chunk: int, seconds: float) -> float:
        """Seconds of a prompt in such chunks."""
        return max(1.0, self.fresh / chunk) * seconds

    def _chunk(self, decodes: StepShape | None) -> tuple[int, float]:
        """Prompt tokens of a step beside these decodes, and its seconds; a chunk from the middle of the prompt."""
        shape, fresh = self.model.shape, self.fresh
        budget = usual_budget(OURS.max_step_tokens, 1e3 * self.model.predict(decode_step(shape, 1, 1)))
        budget = msgspec.structs.replace(budget, milliseconds=(budget.milliseconds or 0.0) / self.slowness)
        until = budget.until(self.model.predict(decodes) * 1e3 if decodes else 0.0)

        def seconds(tokens: int) -> float:
            piece = prefill_step(shape, tokens, self.cached + (fresh - tokens) // 2)
            return self.model.predict(mixed_step(decodes, piece) if decodes else piece)

        fits, too_many = 1, min(fresh, OURS.max_step_tokens) + 1
        while too_many - fits > 1:
            count = (fits + too_many) // 2
            fits, too_many = (count, too_many) if seconds(count) * 1e3 <= until else (fits, count)
        return fits, seconds(fits)


def loop_of(timing: Timing, deployment: Deployment) -> ClosedLoop:
    """The closed loop of a deployment on the measured machine."""
    prompt, output = max(1, round(deployment.prompt)), max(1, round(deployment.output))
    rows = min(deployment.capacity, float(OURS.max_rows))
    cached = round(min(deployment.cached, prompt - 1))
    return ClosedLoop(timing.model, prompt, output, rows, cached, timing.high)
