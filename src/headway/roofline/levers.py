"""Every lever on the price of a token: the one term of the step-time model it changes, and by how much *here* (B11)."""

from __future__ import annotations

import msgspec

from headway.roofline.capacity import memory_batch
from headway.roofline.replica import Replica, decode, prompt_seconds, rate, requantised
from headway.roofline.speculation import Draft, best_length, verify_costs
from headway.roofline.step import StepCost, can_split
from headway.shape.formats import nominal_bytes
from headway.shape.model import KVGroup, ModelShape


class Lever(msgspec.Struct, frozen=True):
    """One change to a deployment.

    Attributes:
        name: what to do. term: the term of the step it attacks.
        term_before, term_after: seconds of that term in one step (for capacity and prefill levers: of the same share).
        seconds_before, seconds_after: the step.
        throughput: tokens/s after over before, at the same batch.
        filled: the same, each at as many sequences as fit; None where none do now.
        requests: requests per dollar after over before, at the same batch, prompts included.
        batch_before, batch_after: sequences that fit in memory.
        note: what it costs, or when it does not apply.
        estimated: `requests` by an engine's closed loop; None where nothing like it was measured.
    """

    name: str
    term: str
    term_before: float
    term_after: float
    seconds_before: float
    seconds_after: float
    throughput: float
    filled: float | None
    requests: float
    batch_before: int
    batch_after: int
    note: str = ""
    estimated: float | None = None


def mean_context(input_tokens: float, output_tokens: float) -> float:
    """A sequence that starts with T_in and writes T_out holds T_in + T_out/2 on average while it decodes."""
    return input_tokens + output_tokens / 2.0


class Request(msgspec.Struct, frozen=True):
    """One request: tokens in, of which `cached` are prefix hits, and out; `mfu`: of its prompt."""

    batch: int
    prompt: float
    output: float
    mfu: float
    cached: float = 0.0

    def cost(self, d: Replica, faster: float = 1.0) -> float:
        """GPU-seconds it takes: its prompt, and its share of as many steps as it has tokens, `faster` tokens each."""
        step = decode(d, self.batch, mean_context(self.prompt, self.output)).seconds
        prompt = prompt_seconds(d, self.prompt, self.mfu, cached=min(self.cached, self.prompt - 1))
        return d.gpus * (prompt + self.output * step / self.batch / faster)


def levers(
    d: Replica, batch: int, input_tokens: float, output_tokens: float, draft: Draft, hit_share: float = 0.5,
    mfu: float = 0.5,
) -> list[Lever]:  # fmt: skip
    """The table for this deployment at this batch, by what a request then costs; prompts are computed at `mfu`."""
    context = mean_context(input_tokens, output_tokens)
    request = Request(batch, input_tokens, output_tokens, mfu)

    def lever(
        name: str, term: str, after: Replica, new_context: float = context, note: str = "", then: Request = request
    ) -> Lever:
        old, new = decode(d, batch, context), decode(after, batch, new_context)
        room, fits = memory_batch(d, context), memory_batch(after, new_context)
        return Lever(
            name, term, _term(old, term), _term(new, term), old.seconds, new.seconds, old.seconds / new.seconds,
            rate(after, fits, new_context) / now if (now := rate(d, room, context)) else None,
            request.cost(d) / then.cost(after), room, fits, note,
        )  # fmt: skip

    table = [
        lever(f"weights in {name}", "weights", requantised(d, name), note=note)
        for name, note in (("fp8", "small loss"), ("int4", "loss in the tails; measure it"))
        if nominal_bytes(name) < 0.9 * d.weight_width
    ]
    if d.shape.kv_width > 1:
        smaller = msgspec.structs.replace(d, shape=d.shape.with_kv_bytes(1.0))
        table.append(lever("cache in 8 bits", "kv", smaller, note="little loss"))
    full = _windowed(d.shape, 4096)
    if full is not None and context > 4096:
        note = "another model: only where it was trained with a window"
        table.append(lever("sliding window of 4096", "kv", msgspec.structs.replace(d, shape=full), note=note))
    if output_tokens > 1:
        half = mean_context(input_tokens, output_tokens / 2)
        shorter = msgspec.structs.replace(request, output=output_tokens / 2)
        table.append(
            lever("half the output tokens", "kv", d, half, "thinking counts; half the steps per answer", shorter)
        )
    if can_split(d.shape, 2 * d.gpus):
        twice = msgspec.structs.replace(d, gpus=2 * d.gpus)
        table.append(lever("twice the GPUs", "weights", twice, note="twice the price"))
    table.append(_speculation(d, request, context, draft))
    table.append(_prefix(d, request, context, hit_share))
    return sorted(table, key=lambda row: -row.requests)


def _term(cost: StepCost, term: str) -> float:
    """Seconds of a term; all matrices are one here."""
    return cost.weights if term == "weights" else cost.sum(term)


def _windowed(shape: ModelShape, window: int) -> ModelShape | None:
    """The model with its full-attention layers windowed, None if it has none."""
    if not any(group.kind == "full" for group in shape.groups):
        return None

    def narrowed(group: KVGroup) -> KVGroup:
        if group.kind != "full":
            return group
        return msgspec.structs.replace(group, kind="window", window=window)

    return msgspec.structs.replace(shape, groups=tuple(map(narrowed, shape.groups)))


def _speculation(d: Replica, request: Request, context: float, draft: Draft) -> Lever:
    """Verification over k+1 positions costs arithmetic, and in a mixture the experts the further positions touch: what
    it gains shrinks as the batch grows."""
    batch = request.batch
    step = decode(d, batch, context).seconds
    k, worth = best_length(draft, 8, verify_costs(d.step_time(), batch, context, 8))
    fits = memory_batch(d, context)
    accepted = "as the curve says" if draft.curve else f"if {draft.acceptance:.0%} are accepted"
    note = f"{k} drafts per step, {accepted}" if k else "a loss at this batch"
    filled = best_length(draft, 8, verify_costs(d.step_time(), fits, context, 8))[1] if fits else None
    return Lever(
        "speculative decoding", "steps per token", step, step / worth, step, step / worth, worth, filled,
        request.cost(d) / request.cost(d, worth), fits, fits, note,
    )  # fmt: skip


def _prefix(d: Replica, request: Request, context: float, hit_share: float) -> Lever:
    """A prefix hit removes prefill, and leaves the decode step as it is."""
    step, fits = decode(d, request.batch, context).seconds, memory_batch(d, context)
    cached = msgspec.structs.replace(request, cached=hit_share * request.prompt)
    note = f"{hit_share:.0%} of input tokens skip prefill; the decode step is unchanged"
    before, after = (
        prompt_seconds(d, one.prompt, one.mfu, cached=min(one.cached, one.prompt - 1)) for one in (request, cached)
    )
    return Lever(
        "prefix cache", "prefill", before, after, step, step, 1.0, 1.0 if fits else None,
        request.cost(d) / cached.cost(d), fits, fits, note,
    )  # fmt: skip
