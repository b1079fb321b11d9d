"""What each verb of `headway plan` answers: `--json` is these structs as they stand, `render` shows them.

SI units (seconds, bytes, tokens/s) unless a name ends in another: `_ms`, `_us`, `_gb`, `usd_per_`. None: not known, or
not asked for. `terms` of a step are seconds each part takes alone; in a bound reading and arithmetic overlap, so they
do not add up to `seconds`.
"""

from __future__ import annotations

import msgspec

from headway.plan.traffic import Target, Traffic
from headway.roofline.cost import PriceRow
from headway.roofline.frontier import FrontierPoint
from headway.roofline.hardware import Hardware
from headway.roofline.levers import Lever
from headway.roofline.memory import MemoryPlan
from headway.roofline.timing import Range


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """The base of whatever a verb answers."""

    @property
    def failed(self) -> bool:
        """Is the answer that there is none, or a claim refuted? The command then ends with exit code 1."""
        return False


class Answer(Verdict, frozen=True, kw_only=True):
    """What every answer about one replica says first.

    Attributes:
        gpus: of the replica. precision: of the weights. math: of the arithmetic.
        kv_bytes_per_number: of the cache; 0 if there is none.
        memory: of one GPU; what is kept for activations is the verb's to say.
        mode: "textbook", "exact" or "calibrated". kind: "bound" (nothing is faster) or "estimate".
        notes: what to beware of here. assumptions: what the figures rest on, with the option that changes it.
    """

    model: str
    hardware: str
    gpus: int | None
    precision: str
    kv_bytes_per_number: float
    math: str
    memory: MemoryPlan
    mode: str
    kind: str = "bound"
    notes: list[str] = []
    assumptions: list[str] = []


class Step(Answer, frozen=True, kw_only=True):
    """One decode step of `batch` sequences, `chunk` prompt tokens beside. `binds`: "memory" or "compute". `fits`: in
    memory; if not, `gpus_needed` hold it. `range`: of its seconds, on a measured machine."""

    batch: int
    context: int
    chunk: int
    seconds: float
    tokens_per_second: float
    tokens_per_second_per_user: float
    tokens_per_second_per_gpu: float
    binds: str
    largest_term: str
    terms: dict[str, float]
    fits: bool
    gpus_needed: int | None = None
    range: Range | None = None


class Prefill(Answer, frozen=True, kw_only=True):
    """Prefill of one prompt, of which `cached_tokens` were found in the prefix cache. `mfu`: assumed; None and with a
    `range` of the seconds on a measured machine. `attention_overtakes`: length of a prompt whose attention is as much
    work as its matrices; None = no length."""

    input_tokens: int
    cached_tokens: int
    mfu: float | None
    seconds: float
    tokens_per_second: float
    binds: str
    terms: dict[str, float]
    attention_overtakes: float | None
    range: Range | None = None


class Frontier(Answer, frozen=True, kw_only=True):
    """Interactivity against throughput at one context; landmarks as in `roofline.frontier`. `fits_batch`: the largest
    that memory holds."""

    context: int
    knee: float | None
    critical_context: float | None
    ceiling: float | None
    fits_batch: int
    points: list[FrontierPoint]


class Capacity(Answer, frozen=True, kw_only=True):
    """The largest batch and its limits, as in `roofline.capacity`. `gpus_needed`: fewest that hold the weights and one
    sequence, where these do not. `seconds`: the step at that batch."""

    context: int
    tpot_ms: float | None
    batch: int
    limited_by: str
    because: str
    memory_batch: int
    tpot_memory_batch: int | None
    tpot_compute_batch: int | None
    free_bytes: float
    bytes_per_sequence: float
    gpus_needed: int | None = None
    seconds: float | None = None
    tokens_per_second: float | None = None

    @property
    def failed(self) -> bool:
        return not self.batch


class TensorParallel(Answer, frozen=True, kw_only=True):
    """The decode step by number of GPUs, which are the keys. `message_bytes`: of one all-reduce."""

    batch: int
    context: int
    all_reduce: str | None
    link_latency_us: float
    message_bytes: float
    seconds: dict[int, float]
    best_degree: int
    best_degree_continuous: float | None
    binds: dict[int, str]
    terms: dict[int, dict[str, float]]
    fits: dict[int, bool]


class Priced(Answer, frozen=True, kw_only=True):
    """An answer in dollars. `mfu`: share of the peak that prefill is taken to reach."""

    context: int
    price_per_gpu_hour: float
    price_source: str
    mfu: float


class Cost(Priced, frozen=True, kw_only=True):
    """Dollars per million tokens of a replica busy `utilisation` of the time; the decode step behind it. `ratio`: price
    of output over that of input. The input price counts `cache_hit` of it as hits, the "fresh" one none."""

    batch: int
    fits: bool
    utilisation: float
    cache_hit: float
    seconds: float
    binds: str
    terms: dict[str, float]
    ratio: float | None
    usd_per_million_input: float
    usd_per_million_output: float
    usd_per_million_fresh_input: float
    prefill_tokens_per_second: float
    decode_tokens_per_second: float
    usd_per_hour: float


class CostTable(Priced, frozen=True, kw_only=True):
    """Prices by batch, the weights' read alone counted, and which batches' caches do not fit at `context`."""

    weights_gb: float
    memory_gb: float
    free_gb: float
    rows: list[PriceRow]


class Ratio(Answer, frozen=True, kw_only=True):
    """Price of an output token over that of an input token: the weights' part and the cache's. `input_tokens`: length
    of a prompt, which only exact mode asks for."""

    batch: int
    context: int
    mfu: float
    input_tokens: int | None
    ratio: float
    weights_part: float
    cache_part: float


class Levers(Answer, frozen=True, kw_only=True):
    """What each change to the replica is worth, largest gain first."""

    batch: int
    input_tokens: int
    output_tokens: int
    levers: list[Lever]


class Sensitivity(msgspec.Struct, frozen=True):
    """One change, at the largest batch each replica allows. `throughput`, `batch`: relative to now (None: nothing is
    possible now). `capacity`: sequences then."""

    change: str
    throughput: float | None
    tokens_per_second: float
    batch: float | None
    capacity: int
    then_limited_by: str


class Explained(Step, frozen=True, kw_only=True):
    """A step, what limits the batch (`capacity` sequences within `tpot_ms`), and what would change it."""

    tpot_ms: float | None
    largest_share: float
    capacity: int
    limited_by: str
    knee: float | None
    critical_context: float | None
    next_limits: list[str]
    sensitivities: list[Sensitivity]
    frontier: Frontier


class Served(Answer, frozen=True, kw_only=True):
    """TTFT and TPOT of requests in a closed loop of `concurrency`. `abstained`: why there is no estimate, "" if there
    is one. `seconds`: the TPOT, else its bound; its `terms` add up to it. `tokens_per_second`: output of all requests,
    the wait for their first tokens counted."""

    engine: str
    concurrency: float
    input_tokens: float
    output_tokens: float
    tpot: Range | None
    ttft: Range | None
    bound_tpot: float
    bound_ttft: float
    abstained: str
    seconds: float
    tokens_per_second: float
    terms: dict[str, float]


class Offer(msgspec.Struct, frozen=True, kw_only=True):
    """Replicas that carry the traffic within the targets.

    Attributes:
        rank: 1 is the cheapest. gpus: of one replica. total_gpus: of all.
        replicas: that decode (and prefill, unless `prefill_replicas` do).
        attention_dp: groups of a replica's GPUs with sequences of their own. memory: of one GPU.
        max_model_len: context limit to set: what the traffic needs, as far as the memory holds it.
        batch, peak_batch: decodes at once, in the mean and at the target's percentile. chunk: prompt tokens per step.
        rows: sequences that a replica must hold to carry its goodput.
        ttft_ms, tpot_ms: at the target's percentile.
        basis: "calibrated", "extrapolated", or "measured" on this machine.
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
    goodput: float
    utilisation: float
    headroom: float
    survives_one_loss: bool
    limited_by: str
    price_per_gpu_hour: float
    usd_per_hour: float
    usd_per_million_input: float
    usd_per_million_output: float
    flags: dict[str, str] = {}


class Rejected(msgspec.Struct, frozen=True):
    """A deployment that cannot carry the traffic, and why."""

    name: str
    reason: str


class Search(Verdict, frozen=True, kw_only=True):
    """Deployments, cheapest first. `considered`: how many were tried."""

    model: str
    kind: str = "estimate"
    mode: str = "exact"
    basis: str
    traffic: Traffic
    target: Target
    budget: float | None
    deployments: list[Offer]
    considered: int
    rejected: list[Rejected]
    assumptions: list[str]

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
    """The verdict on one row of a file, by its line. `flags` empty: nothing impossible found. `unchecked`: why it could
    not be judged, if so. `doubt`: why its device cannot have done it alone."""

    row: int
    model: str
    hardware: str
    mbu: float | None
    mfu: float | None
    flags: tuple[str, ...]
    unchecked: str
    doubt: str = ""


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
