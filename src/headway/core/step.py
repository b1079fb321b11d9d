"""Seam one: a `StepPlan` goes out to an executor, a `StepResult` comes back. Nothing else crosses.

    Scheduler --plan()--> StepPlan --> Executor (model | simulator | replay) --> StepResult --commit()--> Scheduler

Blocks are named per *KV group* (`roofline.shape.KVGroup`): one id space per group, so every block list here is a
tuple with one entry per group. Structs are immutable and serialisable with msgspec, so plans can be logged,
compared and replayed.
"""

from __future__ import annotations

import msgspec

from headway.core.errors import BadInput
from headway.core.request import Finish, SamplingParams

BlockIds = tuple[tuple[int, ...], ...]  # [group][block]


class Capabilities(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What an executor can hold and do in one step. A plan never exceeds it.

    Attributes:
        block_size: tokens per cache block, the same in every KV group.
        blocks: per KV group, blocks in its pool.
        windows: per KV group, positions its layers look back over, their own included; None = all of them.
        max_rows: rows in a step, and rows held at once.
        max_tokens_per_step: new tokens in a step; at least max_rows, so that no decode ever waits for another.
        max_model_len: longest context, prompt and generated tokens together.
        long_after: a row that knows more tokens than so many is computed with other positions (LongRoPE), from its
            start: anew when it grows past them; and it shares no blocks with shorter ones. None = no row.
        max_prompt_logits: prompt positions whose logits one step may want (prompt_logprobs); None = all it computes.
            Bounds the memory of logits, which are as wide as the vocabulary.
        max_drafts: proposed tokens, of all rows together, that one step may verify; 0 = no plan holds any. Bounds the
            memory of their logits.
        max_in_flight: plans that may be submitted before the result of the first is committed. With two, a decode is
            planned while its token is still being drawn: the executor knows that token, the scheduler need not.

    Raises:
        BadInput: the figures contradict each other.
    """

    block_size: int
    blocks: tuple[int, ...]
    windows: tuple[int | None, ...]
    max_rows: int
    max_tokens_per_step: int
    max_model_len: int
    long_after: int | None = None
    max_prompt_logits: int | None = None
    max_drafts: int = 0
    max_in_flight: int = 1

    def __post_init__(self) -> None:
        for name in (
            "block_size", "max_rows", "max_tokens_per_step", "max_model_len", "max_prompt_logits", "max_in_flight",
            "long_after",
        ):  # fmt: skip
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise BadInput(name, f"{getattr(self, name)} is not an integer >= 1")
        if self.max_drafts < 0:
            raise BadInput("max_drafts", f"{self.max_drafts} is not an integer >= 0")
        if not self.blocks or min(self.blocks) < 1 or len(self.windows) != len(self.blocks):
            raise BadInput("blocks", f"{self.blocks} must name one pool of >= 1 blocks per KV group of {self.windows}")
        if any(window is not None and window < 1 for window in self.windows):
            raise BadInput("windows", f"{self.windows}: a window is an integer >= 1, or None")
        if self.max_tokens_per_step < self.max_rows:
            raise BadInput("max_tokens_per_step", f"{self.max_tokens_per_step} is less than max_rows {self.max_rows}")


class RowInit(msgspec.Struct, frozen=True, gc=False):
    """A row the executor does not hold yet. Sent once, and again after preemption.

    Attributes:
        id: the request.
        tokens: all its tokens so far (prompt, and what it generated before a preemption).
        prompt_len: how many of them are prompt.
        params: sampling parameters, seed set.
        choice: index among n choices; part of the noise key.
        stop_ids: ids masked until min_tokens are generated.
        blocks: its full block table at this moment, `[group][block]`; -1 where a window group holds no block.
        adapter: LoRA adapter name, "" = none.
    """

    id: str
    tokens: tuple[int, ...]
    prompt_len: int
    params: SamplingParams
    choice: int = 0
    stop_ids: tuple[int, ...] = ()
    blocks: BlockIds = ()
    adapter: str = ""


class Work(msgspec.Struct, frozen=True, gc=False):
    """One row of a step: compute tokens [start, start + count) of request `id`.

    Of the row's tokens at those positions the last `len(draft)` are the proposed ones in `draft`; ids below 0 stand for
    drafts that the executor has promised, and says when the step begins. While the step before
    is in flight the last one may be the token it draws, which only the executor knows.

    Attributes:
        blocks: blocks appended to the row's table by this step, `[group][block]`; empty tuple = none for any group.
            Does not repeat what a RowInit in the same plan holds.
        logits: at how many last positions logits are wanted; 0 for a prefill chunk that does not reach the end.
        sample: draw a token from the last position (and verify the drafts before it).
        prompt_logprobs: report logprobs of the prompt tokens that follow the positions computed here.
        pool: the hidden states of these positions count, as the row's `pooling` says; its last work has the outcome.
    """

    id: str
    start: int
    count: int
    draft: tuple[int, ...] = ()
    blocks: BlockIds = ()
    logits: int = 0
    sample: bool = False
    prompt_logprobs: bool = False
    pool: bool = False

    @property
    def decode(self) -> bool:
        """One known token, perhaps with drafts, and a draw."""
        return self.sample and self.count == 1 + len(self.draft)


class BlockCopy(msgspec.Struct, frozen=True, gc=False):
    """Copy block `src` to `dst` in `group` before the step computes anything (copy on write)."""

    group: int
    src: int
    dst: int


class StepPlan(msgspec.Struct, frozen=True):
    """Everything an executor needs for one step; O(changes) in size, not O(context).

    Attributes:
        step: number of the step, from 0.
        new: rows the executor must create first.
        work: what to compute; order is the order of rows in the batch.
        gone: rows to drop before anything else (finished, cancelled, preempted).
        copies: block copies to make before computing.
        predicted: seconds the step-time model expects; None without a profile.
        keep_up: a draft model, if there is one, is to compute what it has not of the step's rows: drafts pay.
    """

    step: int
    new: tuple[RowInit, ...] = ()
    work: tuple[Work, ...] = ()
    gone: tuple[str, ...] = ()
    copies: tuple[BlockCopy, ...] = ()
    predicted: float | None = None
    keep_up: bool = True

    @property
    def empty(self) -> bool:
        """True if there is nothing to compute and nothing to tell the executor."""
        return not (self.work or self.gone or self.copies)


class TokenLogprobs(msgspec.Struct, frozen=True, gc=False):
    """Raw-distribution logprobs at one position: the chosen token's, its rank (1 = likeliest), and the top ones."""

    token: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...] = ()


class Seconds(msgspec.Struct, frozen=True, gc=False):
    """Measured (or simulated) seconds of a step, by part.

    Attributes:
        prepare: laying out the batch.
        forward: the backend's program.
        sample: drawing tokens.
        host: the engine loop's: planning this step, and commit, texts and messages of the step before.
        draft: a draft model's.
    """

    prepare: float = 0.0
    forward: float = 0.0
    sample: float = 0.0
    host: float = 0.0
    draft: float = 0.0

    @property
    def outside(self) -> float:
        """All but the forward pass: what the host adds to a step."""
        return self.prepare + self.sample + self.host + self.draft

    @property
    def executor(self) -> float:
        """The model's own: what its step-time model predicts."""
        return self.prepare + self.forward + self.sample

    @property
    def total(self) -> float:
        return self.executor + self.host + self.draft


class StepResult(msgspec.Struct):
    """What an executor made of a plan.

    Attributes:
        step: the plan's number.
        tokens: per row that sampled, the ids emitted: accepted drafts, then one drawn token.
        finish: rows that end with this step for a reason only the engine sees (a stop string).
        logprobs: per row, one entry per emitted token, if asked for.
        prompt_logprobs: per row, entries for the prompt tokens after the positions computed in this step.
        pooled: of rows whose prompt is pooled, and complete: float32 numbers, little-endian.
        drafts: ids proposed for the next step, per row. odds: probability that one of them is accepted, per row;
            1 where nobody says.
        experts: experts that rows were routed to, per layer that has experts (or the mean of all these layers).
        seconds: time spent.
        failed: rows that failed, each with a sentence; other rows are not affected.
    """

    step: int
    tokens: dict[str, tuple[int, ...]] = {}
    finish: dict[str, Finish] = {}
    logprobs: dict[str, tuple[TokenLogprobs, ...]] = {}
    prompt_logprobs: dict[str, tuple[TokenLogprobs, ...]] = {}
    pooled: dict[str, bytes] = {}
    drafts: dict[str, tuple[int, ...]] = {}
    odds: dict[str, float] = {}
    experts: tuple[float, ...] = ()
    seconds: Seconds = Seconds()
    failed: dict[str, str] = {}


class StepShape(msgspec.Struct, frozen=True, gc=False):
    """The size of a step, all that the step-time model needs to predict it.

    Attributes:
        tokens: new tokens over all rows.
        rows: rows in the step.
        logit_rows: positions whose logits are computed.
        kv_tokens: per KV group, cached tokens read by attention, summed over rows (capped by the window), each
            row's own new tokens included.
        pairs: per KV group, query-key pairs, summed over rows (what attention's arithmetic is proportional to).
        decode_kv_tokens, decode_pairs: the part of the two above that belongs to rows with one new token, and perhaps
            drafts behind it.
        copies: blocks copied.
        experts: experts of a layer that the rows went to, mean over the layers that have them, once it is measured;
            None = as many as routing is expected to touch.
        skew: unevenness of routing that steps before this one showed; None = as the model assumes.
    """

    tokens: int
    rows: int
    logit_rows: int
    kv_tokens: tuple[int, ...]
    pairs: tuple[int, ...]
    decode_kv_tokens: tuple[int, ...] = ()
    decode_pairs: tuple[int, ...] = ()
    copies: int = 0
    experts: float | None = None
    skew: float | None = None

    def verifying(self, drafts: float, rows: float) -> StepShape:
        """The same step with so many drafts more behind the new tokens of `rows` decodes. Caches are read once."""
        more = [drafts / rows * pairs for pairs in self.decode_pairs]
        return msgspec.structs.replace(
            self,
            tokens=self.tokens + drafts,
            logit_rows=self.logit_rows + drafts,
            pairs=tuple([a + b for a, b in zip(self.pairs, more, strict=True)]),
            decode_pairs=tuple([a + b for a, b in zip(self.decode_pairs, more, strict=True)]),
        )

    def touching(self, experts: tuple[float, ...]) -> StepShape:
        """The same step, known to have touched so many experts in each layer that has them; () = there are none."""
        return msgspec.structs.replace(self, experts=sum(experts) / len(experts)) if experts else self


def blocks_held(tokens: int, window: int | None, block_size: int, most_new: int) -> int:
    """The most blocks of one KV group that a row of `tokens` computed tokens ever holds at once."""
    blocks = -(-tokens // block_size)
    if window is None:
        return blocks
    # Before the blocks behind it are trimmed, a step of n new tokens sees n + window - 1 positions, not aligned.
    return min(blocks, -(-(window - 1 + most_new) // block_size) + 1)


def keys_read(start: int, count: int, window: int | None) -> int:
    """Cached positions that queries [start, start + count) look at, their own included."""
    return start + count if window is None else min(start + count, window - 1 + count)


def pairs_computed(start: int, count: int, window: int | None) -> int:
    """Query-key pairs of causal attention: query at position p sees min(p + 1, window) keys."""
    growing = count if window is None else min(max(window - start, 0), count)  # queries that still see everything
    return growing * start + growing * (growing + 1) // 2 + (count - growing) * (window or 0)
