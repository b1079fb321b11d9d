"""What the verbs that list, search and judge answer: `models`, `hardware`, `search`, `audit`, `score`."""

from __future__ import annotations

import msgspec

from headway.plan.answers import Verdict
from headway.plan.traffic import Target, Traffic
from headway.roofline.hardware import Hardware
from headway.roofline.memory import MemoryPlan


class Workers(msgspec.Struct, frozen=True):
    """One replica: its device, GPUs, and how these divide the work; nodes of one group of links each."""

    hardware: str
    gpus: int
    attention_dp: int = 1
    expert_parallel: int = 1
    pipeline: int = 1
    nodes: int = 1


class Offer(msgspec.Struct, frozen=True, kw_only=True):
    """Replicas that carry the traffic within the targets.

    Attributes:
        rank: 1 is the cheapest. gpus: of one replica. total_gpus: of all.
        replicas: that decode (and prefill, unless `prefill_replicas` do).
        attention_dp, expert_parallel, pipeline, nodes: how a replica's GPUs divide the work. memory: of one GPU.
        prefill: the workers of a prefill pool; None = prompts are computed beside the decodes.
        max_model_len: context limit to set: what the traffic needs, as far as the memory holds it.
        batch, peak_batch: decodes at once, in the mean and at the target's percentile. chunk: prompt tokens per step.
        rows: sequences that a replica must hold to carry its goodput.
        ttft_ms, tpot_ms: at the target's percentile.
        basis: "calibrated", "extrapolated", or "measured" on this machine.
        rate: requests/s that it carries. watts: drawn by all, None where a device's are not known.
        joules_per_output_token: of all that is drawn, prompts included.
        goodput: requests/s it could carry. utilisation: the traffic's share of that. headroom: the rest, over it.
        survives_one_loss: of a replica.
        limited_by: what breaks first: "memory", "tpot", "ttft", "throughput".
        flags: by engine, the command lines that run it.
    """

    rank: int
    name: str
    hardware: str
    hardware_kind: str
    gpus: int
    total_gpus: int
    precision: str
    replicas: int
    prefill_replicas: int
    attention_dp: int
    expert_parallel: int
    pipeline: int
    nodes: int
    memory: MemoryPlan
    max_model_len: int
    batch: float
    peak_batch: int
    rows: int
    chunk: int
    ttft_ms: float
    tpot_ms: float
    mean_tpot_ms: float
    basis: str
    rate: float
    watts: float | None
    joules_per_output_token: float | None
    goodput: float
    utilisation: float
    headroom: float
    survives_one_loss: bool
    limited_by: str
    price_per_gpu_hour: float
    price_basis: str
    usd_per_hour: float
    usd_per_million_input: float
    usd_per_million_output: float
    prefill: Workers | None = None
    flags: dict[str, str] = {}


class Tail(msgspec.Struct, frozen=True):
    """Milliseconds that half of the requests, 95 % and 99 % of them stay within."""

    p50: float
    p95: float
    p99: float


class Finalist(msgspec.Struct, frozen=True, kw_only=True):
    """A deployment that was to be played by the simulator, beside what was predicted of it.

    Attributes:
        deployment: as predicted.
        near: the prediction misses a target by up to a quarter; it has a place only if the simulation meets them.
        requests: that were measured, of so many `played`: the others fill the batch and empty it.
        seconds: between the first of those measured and the last.
        ttft, tpot: of these; None = it was not played.
        attainment: share of them that met every target.
        verdict: "meets"; "misses", for sure; "close", where so many requests cannot tell; "not played".
        reason: in words.
    """

    deployment: Offer
    near: bool
    verdict: str
    reason: str
    requests: int = 0
    played: int = 0
    seconds: float = 0.0
    ttft: Tail | None = None
    tpot: Tail | None = None
    attainment: float | None = None

    @property
    def placed(self) -> bool:
        """Does it keep, or get, a place in the ranking?"""
        return self.verdict == "meets" or (not self.near and self.verdict != "misses")


class Rejected(msgspec.Struct, frozen=True):
    """A deployment that cannot carry the traffic, and why."""

    name: str
    reason: str


class Search(Verdict, frozen=True, kw_only=True):
    """Deployments, cheapest first, all priced on one basis but where the user gave a figure ("given").
    `considered`: how many were tried. `finalists`: those played by the simulator. `written`: files that start the
    first."""

    model: str
    kind: str = "estimate"
    mode: str = "exact"
    basis: str
    price_basis: str
    traffic: Traffic
    target: Target
    budget: float | None
    deployments: list[Offer]
    considered: int
    rejected: list[Rejected]
    assumptions: list[str]
    finalists: tuple[Finalist, ...] = ()
    written: tuple[str, ...] = ()

    @property
    def failed(self) -> bool:
        return not self.deployments


class Model(msgspec.Struct, frozen=True):
    """A catalogued model and the hub ids that have its shape. `cache_bytes`: of one sequence of 8192 tokens."""

    name: str
    ids: list[str]
    parameters: float
    active_parameters: float
    layers: int
    context: int
    weight_format: str
    weight_bytes: float
    cache_bytes: float


class Models(Verdict, frozen=True, kw_only=True):
    """Catalogued models."""

    models: list[Model]

    @property
    def failed(self) -> bool:
        return not self.models


class Devices(Verdict, frozen=True, kw_only=True):
    """Catalogued devices, figures per device."""

    devices: list[Hardware]

    @property
    def failed(self) -> bool:
        return not self.devices


class Claim(msgspec.Struct, frozen=True):
    """The verdict on one row of a file, by its line. `flags` empty: nothing impossible found.
    `claimed`, `possible`: tokens/s of a row beyond its device, and the most that this could do. `unchecked`: why it
    could not be judged, if so. `doubt`: why its device cannot have done it alone."""

    row: int
    model: str
    hardware: str
    mbu: float | None
    mfu: float | None
    flags: tuple[str, ...]
    unchecked: str
    doubt: str = ""
    claimed: float | None = None
    possible: float | None = None


class Audit(Verdict, frozen=True, kw_only=True):
    """Verdicts on a file of claims: how many rows, how many of them checked, the flagged ones, how often each reason
    stood in the way of a check, and those that are too large for their devices."""

    file: str
    rows: int
    checked: int
    flagged: int
    unchecked: dict[str, int]
    claims: list[Claim]
    doubted: list[Claim]

    @property
    def failed(self) -> bool:
        return bool(self.claims)


class Errors(msgspec.Struct, frozen=True):
    """Percent, of `n` runs: mean and median of |predicted/measured - 1|, its signed mean, share inside the p10-p90
    range, share abstained from. None: no such runs."""

    n: int
    mape: float | None
    median: float | None
    bias: float | None
    coverage: float | None
    abstained: float


class Group(Errors, frozen=True, kw_only=True):
    """TPOT errors of the runs of one model, system and engine; `kind`: "dense" or "moe"."""

    model: str
    system: str
    backend: str
    kind: str
    ttft_mape: float | None


class Counted(msgspec.Struct, frozen=True):
    """`n` rows, by reason."""

    n: int
    reasons: dict[str, int]


class Score(Verdict, frozen=True, kw_only=True):
    """Predictions against measured runs, by kind of model ("dense", "moe")."""

    tpot: dict[str, Errors]
    ttft: dict[str, Errors]
    groups: list[Group]
    skipped: Counted
    abstained: Counted
