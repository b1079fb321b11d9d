"""How an engine is set up; the same fields for the Python API, the command line and the server's engine process."""

from __future__ import annotations

import math

import msgspec

from headway.core.errors import BadInput
from headway.ops.weight import GROUPS

POLICIES = ("chunked", "prefill-first", "static")
WEIGHTS = ("stored", "int8", "int4")
BACKENDS = ("auto", "native", "reference")
COUNTS = (
    "threads", "max_model_len", "max_rows", "max_step_tokens", "block_size", "max_queued", "max_queued_tokens",
)  # fmt: skip


class EngineOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Set-up of an engine. Every field has a default that serves.

    Attributes:
        model: a folder, a .gguf file, or package:NAME==VERSION#FILE; None = the built-in model.
        backend: "native" (C++ kernels), "reference" (numpy), or "auto": native where it is built.
        weights: "stored" as in the file, or "int8" or "int4": 16 and 32-bit matrices are quantised at load, embedding
            and output matrix to 8 bits (native backend only).
        group: weights that share a scale when quantised at load: 16, 32, 64 or 128; None = 128 for int8, 32 for int4.
        pack_cache: keep weights that were quantised at load on disk, for the next start.
        threads: CPU threads; None = the cores this process may use. The reference backend sets them for numpy in the
            whole process.
        kv_cache_gib: GiB for the KV cache; None = from free memory.
        max_model_len: longest prompt + output in tokens; None = the model's context.
        max_rows: most requests in one step.
        max_step_tokens: most new tokens in one step, the chunk budget.
        step_ms: longest step that a prefill chunk may cause while others decode; None = no such limit. Needs a
            step-time profile of this machine.
        block_size: tokens per cache block. 32, 64, 128 and 256 give the same answers to the bit on the native backend;
            other sizes sum in another order, so answers may differ in the last bits from theirs.
        policy: "chunked" (prefill mixed into decode steps), "prefill-first", or "static".
        max_queued: most waiting requests.
        max_queued_tokens: most prompt tokens waiting.
        event_log: file for the event log; None = none.
        deterministic: refuse a backend whose results depend on batch or chunking, and block sizes that sum in an order
            of their own.
    """

    model: str | None = None
    backend: str = "auto"
    weights: str = "stored"
    group: int | None = None
    pack_cache: bool = True
    threads: int | None = None
    kv_cache_gib: float | None = None
    max_model_len: int | None = None
    max_rows: int = 32
    max_step_tokens: int = 512
    step_ms: float | None = None
    block_size: int = 32
    policy: str = "chunked"
    max_queued: int = 1024
    max_queued_tokens: int = 4_000_000
    event_log: str | None = None
    deterministic: bool = False

    def __post_init__(self) -> None:
        for name in COUNTS:
            value = getattr(self, name)
            if value is not None and value < 1:
                raise BadInput(_flag(name), f"{value} is not an integer >= 1")
        for name in ("kv_cache_gib", "step_ms"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise BadInput(_flag(name), f"{value} is not a number above 0")
        if self.group is not None and self.group not in GROUPS:
            raise BadInput("--group", f"{self.group} is not one of {', '.join(map(str, GROUPS))}")
        if self.group is not None and self.weights == "stored":
            raise BadInput("--group", f"{self.group} needs --weights int8 or int4; stored weights keep their groups")
        for name, accepted in (("policy", POLICIES), ("backend", BACKENDS), ("weights", WEIGHTS)):
            if getattr(self, name) not in accepted:
                raise BadInput(_flag(name), f"{getattr(self, name)!r} is not one of {', '.join(accepted)}")


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
