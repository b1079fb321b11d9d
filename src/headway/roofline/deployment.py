"""A served model under load: what the calibrated model predicts. Nothing here is fitted."""

from __future__ import annotations

import msgspec

from headway.roofline.hardware import Hardware
from headway.roofline.memory import MemoryPlan, replica_memory
from headway.roofline.work import Layout
from headway.shape.formats import FORMATS, MEASURED, known_format
from headway.shape.model import ModelShape, kv_bytes, store_as

CHUNK = 8192.0  # prompt tokens per step: the default budget of all three engines on the devices measured


class Pool(msgspec.Struct, frozen=True):
    """Equal replicas that share a load: GPUs, data-parallel attention and expert-parallel groups of one; how many."""

    gpus: int = 1
    attention_dp: int = 1
    expert_parallel: int = 1
    workers: float = 1.0


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
        workers: replicas like this one that share the prefill pool; `gpus` and `concurrency` are of one.
        prefill: where prompts are computed; None = here, beside the decodes.
        cached: leading tokens of a prompt that the prefix cache has. chunk: prompt tokens of a step.
        drafts: tokens drafted per step; None where runs with and without drafts are mixed and not told apart.
        pipeline: stages of the GPUs, of which each has a part of the layers (`Layout`).
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
    workers: float = 1.0
    prefill: Pool | None = None
    cached: float = 0.0
    chunk: float = CHUNK
    drafts: int | None = 0
    pipeline: int = 1

    @property
    def kind(self) -> str:
        return "moe" if self.shape.is_moe else "dense"

    @property
    def measured(self) -> str:
        """The number format with measured runs that is closest: int4 for other packed formats below 8 bits, 16 bits for
        the rest, which multiply in 16 bits too."""
        format = known_format(self.precision)
        if format is None:
            return "bf16"
        return format.measured or ("int4" if format.width < 0.9 else "bf16")

    @property
    def disaggregated(self) -> bool:
        return self.prefill is not None

    @property
    def prompts(self) -> Deployment:
        """The replica that computes the prompts."""
        if self.prefill is None:
            return self
        return msgspec.structs.replace(
            self, gpus=self.prefill.gpus, attention_dp=self.prefill.attention_dp,
            expert_parallel=self.prefill.expert_parallel, prefill=None, pipeline=1,
        )  # fmt: skip

    @property
    def attention_tp(self) -> int:
        """GPUs that share one sequence's attention."""
        return self.layout.tp

    @property
    def stored(self) -> ModelShape:
        """The model in the formats it is served in: 4-bit mixtures keep all but their routed experts in 16 bits, files
        of other formats what they have."""
        format = weight_format(self)
        as_is = format == self.shape.weight_format and self.precision not in MEASURED
        packed = (self.shape if as_is else store_as(self.shape, format)).with_kv_bytes(self.cache_bytes)
        if not experts_only(self):
            return packed
        wide = store_as(self.shape, "bf16").stored
        return msgspec.structs.replace(packed, stored=msgspec.structs.replace(wide, experts=packed.stored.experts))

    @property
    def memory(self) -> MemoryPlan:
        """Of one GPU."""
        return replica_memory(self.stored, self.hardware, self.layout)

    @property
    def layout(self) -> Layout:
        return Layout(self.gpus, self.attention_dp, self.expert_parallel, self.pipeline)

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
        return kv_bytes(self.stored, tokens, self.attention_tp) / self.pipeline


def weight_format(deployment: Deployment) -> str:
    """Storage of the quantised matrices. A 4-bit checkpoint keeps its own flavour (MXFP4, NVFP4, GPTQ)."""
    own = deployment.shape.weight_format
    if deployment.precision in ("fp4", "int4") and own in ("mxfp4", "nvfp4", "int4"):
        return own
    return deployment.precision


def experts_only(deployment: Deployment) -> bool:
    """Are only the routed experts quantised?"""
    return (
        deployment.shape.is_moe and deployment.precision in MEASURED and FORMATS[weight_format(deployment)].width < 1.0
    )
