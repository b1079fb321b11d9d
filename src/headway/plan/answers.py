"""What each verb of `headway plan` answers: `--json` is these structs as they stand, `render` shows them.

SI units (seconds, bytes, tokens/s) unless a name ends in another: `_ms`, `_us`, `_gb`, `usd_per_`. None: not known, or
not asked for. `terms` of a step are seconds each part takes alone; in a bound reading and arithmetic overlap, so they
do not add up to `seconds`.
"""

from __future__ import annotations

import msgspec

from headway.roofline.frontier import FrontierPoint
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


class ServedLoad(msgspec.Struct, frozen=True):
    """An estimate of served requests at `load` in flight: seconds, and requests/s of the replica, of `output` tokens
    each (in a `Range`, the slowest end first)."""

    load: float
    tpot: Range
    ttft: Range
    requests_per_second: Range
    output_tokens: float


class Frontier(Answer, frozen=True, kw_only=True):
    """Interactivity against throughput at one context; landmarks as in `roofline.frontier`. `fits_batch`: the largest
    that memory holds. `served`: estimates for an engine's requests; `abstained`: why there are none."""

    context: int
    knee: float | None
    critical_context: float | None
    ceiling: float | None
    fits_batch: int
    points: list[FrontierPoint]
    served: list[ServedLoad] = []
    abstained: str = ""


class Capacity(Answer, frozen=True, kw_only=True):
    """The largest batch and its limits, as in `roofline.capacity`. `gpus_needed`: fewest that hold the weights and one
    sequence, where these do not. `seconds`: the step at that batch. `served`: the most in flight by the estimate of an
    engine's requests, `surely`: with the p90 of their TPOT within the promise; `abstained`: why there is none."""

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
    served: ServedLoad | None = None
    surely: ServedLoad | None = None
    abstained: str = ""

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
