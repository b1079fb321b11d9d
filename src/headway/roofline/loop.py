"""Time per output token and time to first token of a closed loop: queueing over the one step-time model.

A replica with `c` requests in flight alternates steps that only decode with steps that also compute a piece of some
new prompt. Every request needs one prompt per `output` tokens, so over one request's life the other c - 1 put
(c - 1) * prompt / output prompt tokens beside each of its steps: that interference, not the bare decode step, is what
separates a textbook figure from a measured one. With f the share of a request's life spent decoding:

    b     = 1 + (c - 1) f                      requests decoding in a step (never more than the cache holds)
    q     = interference (c - 1) f prompt/output        prompt tokens per step
    phi   = min(1, q / chunk)                  share of steps that carry a chunk
    decode = step(b decodes)                   every step is StepTime's
    mixed  = step(b decodes + q/phi prompt tokens)      the chunk shares the weights' read
    apart  = decode + step(q/phi prompt tokens)         engines that do not mix
    TPOT  = ((1 - phi) decode + phi (overlap of mixed and apart)) / tokens accepted of a request's drafts and its own

Disaggregated, prompts are computed by P workers of their own and a decode step carries none; then f is the share of
requests that are past their prompt, in a closed network of one queue (the prefill pool) and one delay (decoding): a
pool that is too small keeps the decode batch small, however many requests are in flight.

TTFT = own prompt + waiting for a step, for other prompts, for the opening burst of the run, and for cache room.
Columns are numpy arrays with one entry per deployment: one evaluation serves a fit over thousands of measured rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from headway.core.step import StepShape
from headway.roofline.collectives import AllReduce
from headway.roofline.constants import IDEAL
from headway.roofline.deployment import Deployment, experts_only
from headway.roofline.step import BOUND, Efficiency, StepTime, mixed_step
from headway.roofline.work import Amounts, Cache, amounts_of
from headway.shape.model import KVGroup

Columns = dict[str, np.ndarray]

ROUNDS = 3  # of the fixed point between the decoding share f and the times it depends on
PARTS = ("weights", "experts", "head", "kv", "all_reduce", "overhead", "prompts")  # of a served token's time


class Fleet(msgspec.Struct, frozen=True):
    """Deployments as columns, nothing fitted in them.

    Attributes:
        amounts: of each replica's steps.
        load: prompt, output, concurrency, capacity (sequences that fit), and what the devices are.
        contexts: per KV group, (positions a decode reads at its mean context, mean pairs of a prompt token, window).
        prompts: the replicas that compute the prompts, where some are others.
    """

    amounts: Amounts
    load: Columns
    contexts: tuple[tuple[np.ndarray, np.ndarray, np.ndarray], ...]
    prompts: Fleet | None = None

    @classmethod
    def of(cls, deployments: Sequence[Deployment]) -> Fleet:
        prompts = None
        if any(deployment.disaggregated for deployment in deployments):
            prompts = cls.of([deployment.prompts for deployment in deployments])
        shapes = [deployment.stored for deployment in deployments]
        groups = max(len(shape.groups) for shape in shapes)
        contexts = [
            [_context(d, shape.groups[index] if index < len(shape.groups) else None)
             for d, shape in zip(deployments, shapes, strict=True)]
            for index in range(groups)
        ]  # fmt: skip
        return cls(
            _stacked([amounts_of(shape, d.layout) for d, shape in zip(deployments, shapes, strict=True)], groups),
            {name: np.array([float(of(d)) for d in deployments]) for name, of in LOAD.items()},
            tuple((column[0], column[1], column[2]) for column in map(np.transpose, contexts)),
            prompts,
        )

    def __getitem__(self, rows: np.ndarray) -> Fleet:
        """Some of them, each as often as it is named."""
        taken = msgspec.structs.replace(
            self.amounts,
            caches=tuple(Cache(*(column[rows] for column in _floats(cache))) for cache in self.amounts.caches),
            **{name: getattr(self.amounts, name)[rows] for name in NUMBERS},
        )
        load = {name: column[rows] for name, column in self.load.items()}
        contexts = tuple(tuple(column[rows] for column in group) for group in self.contexts)
        return Fleet(taken, load, contexts, self.prompts[rows] if self.prompts else None)


NUMBERS = tuple(name for name in Amounts.__struct_fields__ if name != "caches")
LOAD = {
    "prompt": lambda d: d.prompt,
    "fresh": lambda d: max(1.0, d.prompt - d.cached),  # tokens of it that are computed
    "chunk": lambda d: d.chunk,
    "output": lambda d: d.output,
    "concurrency": lambda d: d.concurrency / d.pipeline,  # of one micro-batch, as all below
    "capacity": lambda d: d.capacity / d.pipeline,
    "stages": lambda d: d.pipeline,
    "disaggregated": lambda d: d.disaggregated,
    "workers": lambda d: d.workers,
    "prefills": lambda d: d.prefill.workers if d.prefill else 1.0,
    "drafts": lambda d: d.drafts or 0,
    "unrecorded": lambda d: d.drafts is None,
    "expert_parallel": lambda d: d.expert_parallel,
    "moe_share": lambda d: d.shape.moe.layers / d.shape.layers if d.shape.moe else 0.0,
    "gpus": lambda d: d.layout.stage,
    "bandwidth": lambda d: d.hardware.bandwidth,
    "link": lambda d: d.hardware.reach(d.layout.stage),
    "crossing": lambda d: d.hardware.crosses_nodes(d.layout.stage),
    "peak": lambda d: _peak(d, d.precision),  # of routed experts
    "body_peak": lambda d: _peak(d, "bf16" if experts_only(d) else d.precision),
    "peak16": lambda d: _peak(d, "bf16"),  # of attention and head
}


def _peak(deployment: Deployment, precision: str) -> float:
    device = deployment.hardware
    return device.peak(device.math_for(precision)) or np.inf  # not known: arithmetic is left out


def _context(deployment: Deployment, group: KVGroup | None) -> tuple[float, float, float]:
    if group is None or group.kind == "state":
        return 0.0, 0.0, np.inf
    middle = (deployment.prompt + deployment.cached) / 2
    seen = min(x for x in (middle, group.window, group.read_limit) if x is not None)
    return group.read(deployment.prompt + deployment.output / 2), seen, group.window or np.inf


def _floats(cache: Cache) -> tuple[Any, ...]:
    return cache.read, cache.flops, cache.chunk_read, cache.chunk_flops


def _stacked(several: Sequence[Amounts], groups: int) -> Amounts:
    """Amounts of many replicas, arrays in place of floats. What a query reads is already limited in `contexts`."""
    padded = [[*one.caches, *(Cache() for _ in range(groups - len(one.caches)))] for one in several]
    caches = tuple(
        Cache(*np.array([_floats(caches[index]) for caches in padded]).transpose()) for index in range(groups)
    )
    columns: dict[str, Any] = {name: np.array([float(getattr(one, name)) for one in several]) for name in NUMBERS}
    return Amounts(caches=caches, **columns)


class StepTimes(StepTime):
    """`StepTime` of every deployment of a fleet at once: the same formula over arrays."""

    def __init__(self, fleet: Fleet, efficiency: Efficiency = BOUND, all_reduce: AllReduce | None = None) -> None:
        self.amounts, self.efficiency, self.all_reduce, self.skew = fleet.amounts, efficiency, all_reduce, 0.0
        self.routes = True  # some of them may
        load: Mapping[str, Any] = fleet.load
        self.pi, self.beta, self.gpus = load["peak"], load["bandwidth"], load["gpus"]
        self.stages = load["stages"]

    def predict(self, step: StepShape) -> Any:
        return self.seconds(self.work(step), self.communication(step.tokens))


def constants(fleet: Fleet, k: Mapping[str, Any]) -> tuple[Efficiency, AllReduce]:
    """The calibration's constants as `StepTime` takes them, as columns. Shares of peak arithmetic become shares of the
    experts' peak, which is a replica's one `pi`."""
    q: Mapping[str, Any] = fleet.load
    apart: Any = np.where(q["expert_parallel"] > 1, k["imbalance"], 1.0)
    wide = q["peak16"] / q["peak"]
    efficiency = Efficiency(
        stream=k["stream"], stream_experts=k["stream_experts"], stream_cache=k["stream_cache"],
        linear=k["linear"] * q["body_peak"] / q["peak"], head_linear=k["linear"] * wide, experts=k["expert_linear"],
        attention=k["attention"] * wide, prefill_attention=k["prefill_attention"] * wide, overlap=k["overlap"],
        spread=k["spread"], tile=k["tile"], permute=k["permute"],
        imbalance=apart,
        step=k["step"], layer=k["layer"] + k["moe_layer"] * q["moe_share"], row=k["row"], eager=k["eager"],
    )  # fmt: skip
    latency = k["hop"] * (1 + k["hop_growth"] * np.log2(q["gpus"])) * np.where(q["crossing"] > 0, k["node_hop"], 1.0)
    return efficiency, AllReduce("ring", q["link"] * k["link"], floor=latency)


class Loop:
    """The closed loop of a fleet: `steps` prices the steps of some replicas, `k` holds the constants of queueing."""

    def __init__(self, fleet: Fleet, steps: Callable[[Fleet], StepTimes], k: Mapping[str, Any]) -> None:
        self.fleet, self.q, self.k = fleet, fleet.load, k
        self.model = steps(fleet)
        self.prompts = steps(fleet.prompts) if fleet.prompts else self.model

    @classmethod
    def calibrated(cls, fleet: Fleet, k: Mapping[str, Any]) -> Loop:
        """Under fitted constants."""
        return cls(fleet, lambda some: StepTimes(some, *constants(some, k)), k)

    @classmethod
    def bound(cls, fleet: Fleet) -> Loop:
        """Peak rates, drafts all accepted, no overhead, no interference."""
        return cls(fleet, StepTimes, IDEAL)

    def decoding(self, batch: Any) -> StepShape:
        """A step of `batch` decodes at the mean context, each with its drafts to check."""
        positions: Any = self.q["drafts"] + 1
        reads = tuple(batch * read for read, _, _ in self.fleet.contexts)
        pairs = tuple(positions * read for read in reads)
        return StepShape(positions * batch, batch, positions * batch, reads, pairs, reads, pairs)

    def piece(self, tokens: Any) -> StepShape:
        """A step of `tokens` of a prompt, from anywhere in it."""
        q = self.q
        before = q["prompt"] - q["fresh"] + np.maximum(q["fresh"] - tokens, 0.0) / 2
        keys = tuple(np.minimum(before, window) + tokens for _, _, window in self.fleet.contexts)
        pairs = tuple(tokens * seen for _, seen, _ in self.fleet.contexts)
        none = tuple(0.0 * tokens for _ in keys)
        one: Any = np.ones_like(tokens)
        return StepShape(tokens, one, one, keys, pairs, none, none)

    def solve(self) -> Columns:
        """Columns of seconds, `tpot`, `ttft`, `decode` (a step without prompts), `extra` (prompts beside it, per token)
        and `own` (a prompt alone), and the loop's state: `batch` decoding and `held` in the cache."""
        tokens = self.tokens()
        return tokens | {"ttft": self.first_token(tokens, self.k)}

    def tokens(self) -> Columns:
        """The same but for `ttft`, which nothing here depends on."""
        q, k, step = self.q, self.k, self.model.predict
        prompt, output = q["fresh"], q["output"]
        held = np.minimum(q["concurrency"], q["capacity"])  # the rest waits for cache room
        chunk = np.minimum(prompt, q["chunk"])
        own = k["prompting"] * np.maximum(1, prompt / q["chunk"]) * self.prompts.predict(self.piece(chunk))
        apart, alone = q["disaggregated"] > 0, own
        mixing = k["mixing"] / (1 + k["mixing"])
        accepted = (1 - k["acceptance"] ** (q["drafts"] + 1)) / (1 - k["acceptance"])  # tokens of a request per step
        drafting = 1 + k["draft"] * q["drafts"]
        share = np.ones_like(held)
        for _ in range(ROUNDS):
            batch = 1 + (held - 1) * share
            decodes = self.decoding(batch)
            decode = step(decodes) * drafting
            arriving = k["interference"] * (held - 1) * share * prompt / output * accepted
            phi = np.minimum(1.0, arriving / chunk)
            piece = self.piece(arriving / np.maximum(phi, 1e-9))
            mixed = step(mixed_step(decodes, piece)) * drafting
            beside = mixing * mixed + (1 - mixing) * (decode + step(piece))
            extra = np.where(apart, 0.0, phi * (beside - decode))
            life = output * (decode + extra) / accepted
            alone = np.where(apart, self.prefilling(own, life), own + decode)
            share = life / (life + alone)
        tpot = (decode + extra) / accepted * np.exp(-k["speculation"] * q["unrecorded"])
        found = {"tpot": tpot, "batch": batch, "held": held, "decode": decode, "extra": extra, "own": own}
        return found | {"alone": alone}

    def prefilling(self, own: Any, life: Any) -> Any:
        """Seconds a request spends in the prefill pool, waiting included, if it decodes for `life` seconds: the closed
        network of one queue and one delay, by Schweitzer's approximation of mean value analysis."""
        q = self.q
        load = q["concurrency"] * q["workers"]
        waiting = own / q["prefills"] * (load - 1)  # if all others are in the pool
        excess = life - own - waiting
        return (np.sqrt(excess**2 + 4 * own * life) - excess) / 2

    def parts(self, solved: Columns) -> Columns:
        """The terms of `tpot`, which add up to it."""
        terms = self.model.met(self.decoding(solved["batch"]))
        drafts = solved["decode"] - sum(terms.values())
        terms |= {"overhead": terms["overhead"] + drafts, "prompts": solved["extra"]}
        gain = solved["tpot"] / (solved["decode"] + solved["extra"])  # of drafts
        return {name: gain * terms[name] for name in PARTS}

    def first_token(self, solved: Columns, k: Mapping[str, Any]) -> np.ndarray:
        """Own prompt, its share of the queue of prompts, the opening burst, the wait for cache room, the front end."""
        q, held, own = self.q, solved["held"], solved["own"]
        life = q["output"] * solved["tpot"]
        busy = np.minimum(held * own / (life + own), 0.95)
        apart = q["disaggregated"] > 0
        queue = k["queue"] * np.where(apart, solved["alone"] - own, own * busy / (2 * (1 - busy)))
        others = np.where(apart, q["concurrency"] * q["workers"] / q["prefills"], held) - 1
        burst = k["burst"] * np.maximum(others, 0.0) * own / 2
        room = (q["concurrency"] - held) / held * life * k["admission"]
        alone = (1 + k["prompt_extra"]) * own + solved["decode"]
        return np.asarray(k["front"] + k["front_row"] * held + alone + queue + burst + room)
