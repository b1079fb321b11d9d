"""One replica of a model, priced by bounds: steps, prompts and memory as exact figures or as the textbook's (B2-B7).

Both are sets of amounts behind one interface, evaluated by the one `StepTime`:

    Replica    exact: the embedding gathered, matrices in the sizes they are stored in, heads as each GPU holds them
    Textbook   full N, every byte divided by n: what `plan step`, `frontier`, `capacity` and `cost` say by default

    B5 names four constants of a replica at one context:   t_step(B) = max(t_W(B) + B*t_K, B*t_F) + t_0

Every number is a *bound*: divide by MBU (decode) or MFU (prefill) for an estimate.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from headway.core.errors import BadInput
from headway.core.step import StepShape
from headway.roofline.collectives import AllReduce, Fastest
from headway.roofline.hardware import Hardware
from headway.roofline.memory import weights_per_gpu
from headway.roofline.step import (
    Bound,
    Efficiency,
    StepCost,
    StepTime,
    check_layout,
    decode_step,
    peak_rate,
    prefill_step,
)
from headway.roofline.work import Amounts, Cache, Layout, amounts_of, message_bytes
from headway.shape.formats import nominal_bytes
from headway.shape.model import KVGroup, ModelShape, kv_bytes, store_as, weight_bytes


class Replica(msgspec.Struct, frozen=True):
    """A model on `gpus` devices, its precision resolved.

    Attributes:
        shape: the model, its weights and cache in the formats served.
        weights: M_W, bytes of all weights.
        pi: peak FLOP/s of one device in the arithmetic used (infinite if the catalogue has no figure).
        precision: what the weights are stored in, for people.
        math: the arithmetic's format.
        all_reduce: two per layer in every step; None = communication is not counted.
        overhead: t_0, seconds of every step.
        skew: unevenness of expert routing (B8).
        attention_dp, expert_parallel, pipeline: how the GPUs divide the work, as `Layout` says.
    """

    shape: ModelShape
    hardware: Hardware
    gpus: int
    weights: float
    pi: float
    precision: str
    math: str
    all_reduce: AllReduce | Fastest | None = None
    overhead: float = 0.0
    skew: float = 0.0
    attention_dp: int = 1
    expert_parallel: int = 1
    pipeline: int = 1

    @classmethod
    def stored(cls, shape: ModelShape, precision: str) -> tuple[ModelShape, float]:
        """The model with its matrices in a named format, and M_W."""
        packed = store_as(shape, precision)
        return packed, packed.stored.total

    @property
    def weight_width(self) -> float:
        """s_W, mean bytes per weight."""
        return self.weights / self.shape.n_params

    def amounts(self) -> Amounts:
        """What its steps are made of."""
        return amounts_of(self.shape, self.layout)

    @property
    def layout(self) -> Layout:
        return Layout(self.gpus, self.attention_dp, self.expert_parallel, self.pipeline)

    @property
    def weights_per_gpu(self) -> float:
        """M_W / n, and what is held more than once."""
        spread = self.attention_dp > 1 or self.expert_parallel > 1
        return weights_per_gpu(self.shape, self.layout) if spread else self.weights / self.gpus

    def decodes(self, batch: float, context: float) -> StepShape:
        """The step of a micro-batch, of which as many as there are stages make the batch."""
        return decode_step(self.shape, max(1.0, batch / self.pipeline) if self.pipeline > 1 else batch, context)

    def sequence_bytes(self, context: float) -> float:
        """Cache of one sequence on one GPU: heads may not split evenly, latent caches do not split (B6)."""
        return kv_bytes(self.shape, context, self.layout.tp) / self.pipeline

    def on(self, gpus: int) -> Replica:
        """The same, tensor-parallel over so many GPUs (B7)."""
        return msgspec.structs.replace(self, gpus=gpus)

    def prompt(self, tokens: float, cached: float) -> StepShape:
        """The step that computes a prompt of which `cached` leading tokens are prefix hits, one per attention group."""
        return prefill_step(self.shape, round(tokens - cached), round(cached), prompts=self.attention_dp)

    @property
    def prompts_at_once(self) -> int:
        """Prompts in work while one is: of every attention group in every stage."""
        return self.attention_dp * self.pipeline

    def step_time(
        self, efficiency: Efficiency | None = None, all_reduce: AllReduce | Fastest | None = None
    ) -> StepTime:
        """Its steps: the bound, or under an estimate's constants and its engine's all-reduce (a named one goes
        first)."""
        known = {} if self.pi == float("inf") else {"bf16" if self.math == "fp16" else self.math: self.pi}
        device = msgspec.structs.replace(self.hardware, peaks=known)
        constants = efficiency or Bound()
        return StepTime(
            self.shape, device, self.layout, math=self.math, all_reduce=self.all_reduce or all_reduce,
            efficiency=msgspec.structs.replace(constants, step=constants.step + self.overhead), skew=self.skew,
            amounts=self.amounts(),
        )  # fmt: skip


class Textbook(Replica, frozen=True):
    """The texts' replica: all N parameters are read and multiplied, and all bytes are divided by n.

    Attributes:
        split_cache: B7's min(n, n_kv) split of the cache (a tensor-parallel replica) instead of dividing by n.
    """

    split_cache: bool = False

    @classmethod
    def stored(cls, shape: ModelShape, precision: str) -> tuple[ModelShape, float]:
        return shape, weight_bytes(shape, precision)

    def amounts(self) -> Amounts:
        n, shape, moe = self.gpus, self.shape, self.shape.moe
        experts = self.weights * self._expert_share()
        rows, split = (n, 1) if self.split_cache else (1, n)
        states = [group for group in shape.groups if group.kind == "state"]

        def cache(group: KVGroup) -> Cache:
            layers = group.reading_layers
            if group.kind == "state":
                return Cache()
            return Cache(
                layers * group.layer_row_bytes(rows) / split, layers * group.decode_flops / n, 0.0,
                layers * group.prefill_flops / n, group.read_limit,
            )  # fmt: skip

        return Amounts(
            linear_read=(self.weights - experts) / n, linear_flops=2.0 * shape.n_active / n,
            head_read=0.0, head_flops=0.0, expert_read=experts / moe.experts / n if moe else 0.0, expert_flops=0.0,
            experts=moe.experts if moe else 1, active=moe.active if moe else 0, expert_row=0.0, routed=0.0,
            state_read=sum(g.reading_layers * g.layer_row_bytes(rows) for g in states) / split,
            state_flops=sum(g.reading_layers * g.decode_flops for g in states) / n,
            chunk_state_flops=sum(g.reading_layers * g.prefill_flops for g in states) / n,
            caches=tuple(map(cache, shape.groups)), ranks=1, message=message_bytes(shape, 1.0),
            layers=shape.layers, width=shape.d_model, vocab=shape.vocab,
        )  # fmt: skip

    def _expert_share(self) -> float:
        """Routed experts' part of M_W."""
        stored, params = self.shape.stored, self.shape.params
        same = self.precision == self.shape.weight_format and self.weights == stored.total
        return stored.experts / stored.total if same else params.experts / params.total

    def sequence_bytes(self, context: float) -> float:
        return kv_bytes(self.shape, context) / self.gpus

    def on(self, gpus: int) -> Replica:
        return msgspec.structs.replace(self, gpus=gpus, split_cache=True)

    def prompt(self, tokens: float, cached: float) -> StepShape:
        """Attention of a whole prompt has T^2 / 2 pairs (B4: causal, so half of all), fewer under a window."""
        pairs: Any = tuple(_pairs(group, tokens) - _pairs(group, cached) for group in self.shape.groups)
        none, fresh = tuple(0 for _ in pairs), tokens - cached
        return StepShape(fresh, 1, 0, none, pairs, none, none)  # type: ignore[arg-type]


def _pairs(group: KVGroup, tokens: float) -> float:
    limit = min(x for x in (group.window, group.read_limit, tokens) if x is not None)
    return tokens * limit - limit * limit / 2.0


def deploy(
    shape: ModelShape,
    hardware: Hardware,
    gpus: int = 1,
    *,
    precision: str | None = None,
    kv: str | None = None,
    math: str | None = None,
    peak: float | None = None,
    mode: type[Replica] = Textbook,
) -> Replica:
    """Resolve precision and peak.

    Args:
        precision: format of all weights; None = as the checkpoint stores them.
        kv: format of the cache; None = as the shape says (16 bits unless its checkpoint says otherwise).
        math: format of the arithmetic; None = what the device multiplies such weights in.
        peak: pi in FLOP/s, to override the catalogue.
        mode: `Textbook` or `Replica`.
    """
    if gpus < 1:
        raise BadInput("--gpus", f"{gpus}; accepted: a whole number from 1")
    stored = precision or shape.weight_format
    weights = shape.stored.total
    if precision is not None:
        shape, weights = mode.stored(shape, precision)
    if kv is not None:
        shape = shape.with_kv_bytes(nominal_bytes(kv, "--kv"))
    used = math or hardware.math_for(stored)
    if peak is not None and peak <= 0:
        raise BadInput("--peak-tflops", f"{peak}; accepted: a number above 0")
    return mode(shape, hardware, gpus, weights, peak or peak_rate(hardware, used), stored, used)


KEPT = ("all_reduce", "overhead", "skew", "attention_dp", "expert_parallel", "pipeline")


def requantised(d: Replica, precision: str) -> Replica:
    """The same replica with its weights in another format, and the arithmetic that goes with it."""
    after = deploy(d.shape, d.hardware, d.gpus, precision=precision, mode=type(d))
    kept = {name: getattr(d, name) for name in KEPT}
    return msgspec.structs.replace(after, **kept)


def decode(d: Replica, batch: float, context: float) -> StepCost:
    """One decode step of `batch` sequences at mean context `context` (B2, B3, B7)."""
    _positive("--batch", batch)
    not_negative("--context", context)
    return d.step_time().explain(d.decodes(batch, context))


def rate(d: Replica, batch: float, context: float) -> float:
    """Tokens per second of a batch; 0 of none."""
    return batch / decode(d, batch, context).seconds if batch else 0.0


def margins(d: Replica, context: float) -> tuple[float, float]:
    """(t_K, t_F): seconds of reading and of arithmetic that one more sequence adds (B5)."""
    cost = decode(d, 1, context)
    return cost.sum("kv"), cost.compute


def prefill(d: Replica, tokens: float, mfu: float = 1.0, attention: bool = True, cached: float = 0.0) -> StepCost:
    """Prefill of a prompt: (2*N_act*T_in + 2*L*d_attn*T_in^2) / (n*pi*MFU) (B4), never faster than its weights can be
    read once. `cached` leading tokens are prefix hits: not computed, but attended to."""
    check_prompt(tokens, cached)
    share("--mfu", mfu)
    step = d.prompt(tokens, cached)
    if not attention:
        step = msgspec.structs.replace(step, pairs=tuple(0 for _ in step.pairs))
    assumed = Bound(linear=mfu, experts=mfu, attention=mfu, prefill_attention=mfu)
    return d.step_time(assumed).explain(step)


def prompt_seconds(d: Replica, tokens: float, mfu: float = 1.0, attention: bool = True, cached: float = 0.0) -> float:
    """What a prompt takes of a replica's time."""
    return prefill(d, tokens, mfu, attention, cached).seconds / d.prompts_at_once


def check_prompt(tokens: float, cached: float) -> None:
    """Refuse a prompt without tokens, or none of which is to be computed."""
    _positive("--input-tokens", tokens)
    if not 0 <= cached < tokens:
        raise BadInput("--cached-tokens", f"{cached}; accepted: from 0 to below the prompt's {tokens} tokens")


def attention_overtakes(shape: ModelShape) -> float:
    """Prompt length where attention costs as much as the weights: N_act / (L * d_attn) (B4); only full attention
    grows with the prompt. Infinite if no layer has it."""
    slope = sum(
        g.reading_layers * g.prefill_flops
        for g in shape.groups
        if g.kind in ("full", "latent") and g.read_limit is None
    )
    return 4.0 * shape.n_active / slope if slope else float("inf")


def tensor_parallel(d: Replica, degrees: Sequence[int], batch: float, context: float) -> dict[int, StepCost]:
    """The decode step at each tensor-parallel degree (B7)."""
    costs = {}
    for degree in degrees:
        check_layout(d.shape, Layout(degree), field="--degrees")
        costs[degree] = decode(d.on(degree), batch, context)
    return costs


def best_degree_continuous(d: Replica, alpha: float) -> float:
    """n* = sqrt((M_W/beta) / (4*L*alpha)): past it more GPUs make each token slower at batch 1 (B7)."""
    if alpha <= 0:
        raise BadInput("--link-latency-us", "accepted: a number above 0 to have a best degree")
    return (decode(d.on(1), 1, 0).weights / (4.0 * d.shape.layers * alpha)) ** 0.5


def _positive(field: str, value: float) -> None:
    if not value > 0 or value == float("inf"):
        raise BadInput(field, f"{value}; accepted: a number above 0")


def not_negative(field: str, value: float) -> None:
    """Refuse anything but a finite number from 0."""
    if not value >= 0 or value == float("inf"):
        raise BadInput(field, f"{value}; accepted: a number from 0")


def share(field: str, value: float) -> None:
    """Refuse anything but a share above 0 and up to 1."""
    if not 0 < value <= 1:
        raise BadInput(field, f"{value}; accepted: above 0 and up to 1")
