"""The textbook mode of the step-time model (B2-B5, B7): full N, no overhead, bytes over bandwidth, FLOPs over peak.

Default of `plan step`, `frontier`, `capacity` and `cost`. Every number here is a *bound*: divide by MBU (decode) or MFU
(prefill) for an estimate. The scheduler and the simulator use the exact mode (`step.py`) instead.

    B5 names four constants of a deployment at one context:   t_step(B) = max(t_W(B) + B*t_K, B*t_F) + t_0
"""

from __future__ import annotations

import msgspec

from headway.core.errors import BadInput
from headway.roofline import exact
from headway.roofline.collectives import AllReduce
from headway.roofline.hardware import Hardware
from headway.roofline.step import ACTIVATION_BYTES, StepCost, check_layout, experts_touched, peak_rate
from headway.shape.formats import nominal_bytes
from headway.shape.model import ModelShape, kv_bytes, kv_read_bytes


class Replica(msgspec.Struct, frozen=True):
    """One replica of a model on `gpus` devices, its precision resolved.

    Attributes:
        shape: the model, its cache groups in the cache's precision.
        weights: M_W, bytes of all weights.
        pi: peak FLOP/s of one device in the arithmetic used (infinite if the catalogue has no figure).
        precision: what the weights are stored in, for people.
        math: the arithmetic's format.
        all_reduce: two per layer in every step; None = communication is not counted.
        split_cache: B7's min(n, n_kv) split of the cache (a tensor-parallel replica) instead of dividing by n.
        overhead: t_0, seconds of every step.
        skew: unevenness of expert routing (B8).
        exact: steps, prefill and memory are those of exact mode (`exact.py`), whoever asks.
    """

    shape: ModelShape
    hardware: Hardware
    gpus: int
    weights: float
    pi: float
    precision: str
    math: str
    all_reduce: AllReduce | None = None
    split_cache: bool = False
    overhead: float = 0.0
    skew: float = 0.0
    exact: bool = False

    @property
    def beta(self) -> float:
        """Bandwidth of the whole replica, bytes/s."""
        return self.gpus * self.hardware.bandwidth

    @property
    def rate(self) -> float:
        """Peak arithmetic of the whole replica, FLOP/s."""
        return self.gpus * self.pi

    @property
    def weight_width(self) -> float:
        """s_W, mean bytes per weight."""
        return self.weights / self.shape.n_params


def deploy(
    shape: ModelShape,
    hardware: Hardware,
    gpus: int = 1,
    *,
    precision: str | None = None,
    kv: str | None = None,
    math: str | None = None,
    peak: float | None = None,
) -> Replica:
    """Resolve precision and peak.

    Args:
        precision: format of all weights (s_W * N); None = as the checkpoint stores them.
        kv: format of the cache; None = as the shape says (16 bits unless its checkpoint says otherwise).
        math: format of the arithmetic; None = what the device multiplies such weights in.
        peak: pi in FLOP/s, to override the catalogue.
    """
    if gpus < 1:
        raise BadInput("--gpus", f"{gpus}; accepted: a whole number from 1")
    stored = precision or shape.weight_format
    weights = shape.stored.total if precision is None else nominal_bytes(precision) * shape.n_params
    if kv is not None:
        shape = shape.with_kv_bytes(nominal_bytes(kv, "--kv"))
    used = math or hardware.math_for(stored)
    if peak is not None and peak <= 0:
        raise BadInput("--peak-tflops", f"{peak}; accepted: a number above 0")
    return Replica(shape, hardware, gpus, weights, peak or peak_rate(hardware, used), stored, used)


def requantised(d: Replica, precision: str) -> Replica:
    """The same deployment with its weights in another format, and the arithmetic that goes with it."""
    after = deploy(d.shape, d.hardware, d.gpus, precision=precision)
    return msgspec.structs.replace(after, all_reduce=d.all_reduce, overhead=d.overhead, skew=d.skew, exact=d.exact)


def attention_flops(shape: ModelShape, context: float) -> float:
    """Attention of one decoded token: 4 * L * d_attn * T (B2), by layer kind where not all are full."""
    return sum(group.reading_layers * group.decode_flops * group.read(context) for group in shape.groups)


def streamed_weights(d: Replica, tokens: float) -> float:
    """M_W(B): all weights of a dense model; of a mixture only the experts `tokens` tokens touch (B8)."""
    moe = d.shape.moe
    if moe is None:
        return d.weights
    expert_share = _expert_share(d)
    touched = experts_touched(moe.experts, moe.active, tokens, d.skew) / moe.experts
    return d.weights * (1.0 - expert_share + expert_share * touched)


def _expert_share(d: Replica) -> float:
    """Routed experts' part of M_W."""
    stored, params = d.shape.stored, d.shape.params
    same = d.precision == d.shape.weight_format and d.weights == stored.total
    return stored.experts / stored.total if same else params.experts / params.total


def cache_seconds(d: Replica, context: float) -> float:
    """t_K: seconds to read the cache of one sequence. Textbook: divided by n; tensor parallel: by min(n, n_kv)."""
    if d.split_cache:
        return kv_read_bytes(d.shape, context, d.gpus) / d.hardware.bandwidth
    return kv_read_bytes(d.shape, context) / d.beta


def margins(d: Replica, context: float) -> tuple[float, float]:
    """(t_K, t_F): seconds of reading and of arithmetic that one more sequence adds (B5)."""
    if d.exact:
        return exact.margins(d, context)
    return cache_seconds(d, context), (2.0 * d.shape.n_active + attention_flops(d.shape, context)) / d.rate


def decode(d: Replica, batch: float, context: float) -> StepCost:
    """One decode step of `batch` sequences at mean context `context` (B2, B3, B7)."""
    _positive("--batch", batch)
    not_negative("--context", context)
    if d.exact:
        return exact.decode(d, batch, context)
    terms = {
        "weights": streamed_weights(d, batch) / d.beta,
        "kv": batch * cache_seconds(d, context),
        "arithmetic": batch * 2.0 * d.shape.n_active / d.rate,
        "attention": batch * attention_flops(d.shape, context) / d.rate,
        "all_reduce": _all_reduce_seconds(d, batch),
        "overhead": d.overhead,
    }
    memory, compute = terms["weights"] + terms["kv"], terms["arithmetic"] + terms["attention"]
    seconds = max(memory, compute) + terms["all_reduce"] + terms["overhead"]
    return StepCost(seconds, "compute" if compute > memory else "memory", terms)


def _all_reduce_seconds(d: Replica, tokens: float) -> float:
    """2L all-reduces of B*d*s bytes (B7)."""
    if d.all_reduce is None:
        return 0.0
    return 2.0 * d.shape.layers * d.all_reduce.seconds(tokens * d.shape.d_model * ACTIVATION_BYTES, d.gpus)


def prefill(d: Replica, tokens: float, mfu: float = 1.0, attention: bool = True, cached: float = 0.0) -> StepCost:
    """Prefill of a prompt: (2*N_act*T_in + 2*L*d_attn*T_in^2) / (n*pi*MFU) (B4), never faster than its weights can be
    read once. `cached` leading tokens are prefix hits: not computed, but attended to."""
    _positive("--input-tokens", tokens)
    share("--mfu", mfu)
    fresh = tokens - cached
    if not 0 <= cached < tokens:
        raise BadInput("--cached-tokens", f"{cached}; accepted: from 0 to below the prompt's {tokens} tokens")
    if d.exact:
        return exact.prefill(d, tokens, mfu, cached)
    pairs = prefill_flops(d.shape, tokens) - (prefill_flops(d.shape, cached) if cached else 0.0) if attention else 0.0
    terms = {
        "weights": streamed_weights(d, fresh) / d.beta,
        "arithmetic": 2.0 * d.shape.n_active * fresh / (d.rate * mfu),
        "attention": pairs / (d.rate * mfu),
    }
    compute = terms["arithmetic"] + terms["attention"]
    return StepCost(max(compute, terms["weights"]), "compute" if compute >= terms["weights"] else "memory", terms)


def prefill_flops(shape: ModelShape, tokens: float) -> float:
    """Attention of a whole prompt: 2 * L * d_attn * T^2 (B4: causal, so half of all pairs), less under a window."""
    total = 0.0
    for group in shape.groups:
        limit = min(x for x in (group.window, group.read_limit, tokens) if x is not None)
        pairs = tokens if group.kind == "state" else tokens * limit - limit * limit / 2.0
        total += group.reading_layers * group.prefill_flops * pairs
    return total


def attention_overtakes(shape: ModelShape) -> float:
    """Prompt length where attention costs as much as the weights: N_act / (L * d_attn) (B4); only full attention
    grows with the prompt. Infinite if no layer has it."""
    slope = sum(
        g.reading_layers * g.prefill_flops
        for g in shape.groups
        if g.kind in ("full", "latent") and g.read_limit is None
    )
    return 4.0 * shape.n_active / slope if slope else float("inf")


def tensor_parallel(d: Replica, degrees: list[int], batch: float, context: float) -> dict[int, StepCost]:
    """The decode step at each tensor-parallel degree (B7)."""
    costs = {}
    for degree in degrees:
        check_layout(d.shape, degree, field="--degrees")
        costs[degree] = decode(msgspec.structs.replace(d, gpus=degree, split_cache=True), batch, context)
    return costs


def best_degree_continuous(d: Replica, alpha: float) -> float:
    """n* = sqrt((M_W/beta) / (4*L*alpha)): past it more GPUs make each token slower at batch 1 (B7)."""
    if alpha <= 0:
        raise BadInput("--link-latency-us", "accepted: a number above 0 to have a best degree")
    read = streamed_weights(d, 1) / d.hardware.bandwidth
    return (read / (4.0 * d.shape.layers * alpha)) ** 0.5


def cache_bytes(d: Replica, context: float) -> float:
    """Bytes one sequence of `context` tokens keeps cached, over the whole replica."""
    return kv_bytes(d.shape, context)


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
