"""A served model under load: what the calibrated model predicts. Nothing here is fitted."""

from __future__ import annotations

import msgspec

from headway.roofline.hardware import Hardware
from headway.roofline.memory import MemoryPlan, replica_memory
from headway.roofline.work import Layout
from headway.shape.formats import FORMATS
from headway.shape.model import ModelShape, kv_bytes, store_as


class Deployment(msgspec.Struct, frozen=True):
    """One replica serving a closed loop of equal requests.

    Attributes:
        shape, hardware: the model and its device.
        engine, version: "vllm", "sglang", "trtllm", and its release ("" = not known).
        precision: "bf16", "fp8", "fp4" or "int4" (weights; 4-bit mixtures quantise their routed experts only).
        cache_bytes: bytes per cached number.
        gpus: of one replica. attention_dp: groups of them with their own sequences and attention weights.
        expert_parallel: groups the experts are dealt to.
        concurrency: requests in flight on this replica.
        prompt, output: mean tokens per request.
        disaggregated: prompts are computed on other GPUs, as many; `gpus` and `concurrency` are of one decode worker.
        drafts: tokens drafted per step; None where runs with and without drafts are mixed and not told apart.
    """

    shape: ModelShape
    hardware: Hardware
    engine: str
    concurrency: float
    prompt: float
    output: float
    version: str = ""
    precision: str = "bf16"
    cache_bytes: float = 2.0
    gpus: int = 1
    attention_dp: int = 1
    expert_parallel: int = 1
    disaggregated: bool = False
    drafts: int | None = 0

    @property
    def kind(self) -> str:
        return "moe" if self.shape.is_moe else "dense"

    @property
    def attention_tp(self) -> int:
        """GPUs that share one sequence's attention."""
        return max(1, self.gpus // self.attention_dp)

    @property
    def stored(self) -> ModelShape:
        """The model in the formats it is served in: 4-bit mixtures keep all but their routed experts in 16 bits."""
        packed = store_as(self.shape, weight_format(self)).with_kv_bytes(self.cache_bytes)
        if not experts_only(self):
            return packed
        wide = store_as(self.shape, "bf16").stored
        return msgspec.structs.replace(packed, stored=msgspec.structs.replace(wide, experts=packed.stored.experts))

    @property
    def memory(self) -> MemoryPlan:
        """Of one GPU."""
        return replica_memory(self.stored, self.hardware, self.gpus, self.attention_dp)

    @property
    def layout(self) -> Layout:
        return Layout(self.gpus, self.attention_dp, self.expert_parallel)

    @property
    def fits(self) -> bool:
        """Do weights, and the cache of one request per attention group, fit in memory?"""
        return self.memory.sequences(self.cache(self.prompt + self.output)) > 0

    @property
    def capacity(self) -> float:
        """Sequences the replica holds at once, at the context they have when 60 % of their output is there."""
        return max(1.0, self.memory.room / self.cache(self.prompt + 0.6 * self.output)) * self.attention_dp

    def cache(self, tokens: float) -> float:
        """Bytes of a sequence on one GPU that has it."""
        return kv_bytes(self.stored, tokens, self.attention_tp)


def weight_format(deployment: Deployment) -> str:
    """Storage of the quantised matrices. A 4-bit checkpoint keeps its own flavour (MXFP4, NVFP4, GPTQ)."""
    own = deployment.shape.weight_format
    if deployment.precision in ("fp4", "int4") and own in ("mxfp4", "nvfp4", "int4"):
        return own
    return deployment.precision


def experts_only(deployment: Deployment) -> bool:
    """Are only the routed experts quantised?"""
    return deployment.shape.is_moe and FORMATS[weight_format(deployment)].width < 1.0
