"""A served model under load, and the physical quantities of it that the calibrated model multiplies by its constants.

Nothing here is fitted: bytes and FLOPs per GPU come from the model's shape, peaks and links from the device. Columns
are numpy arrays with one entry per deployment, so that the same functions serve a fit over thousands of measured rows
and the prediction of one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec
import numpy as np

from headway.roofline.hardware import Hardware
from headway.roofline.memory import MemoryPlan, replica_memory
from headway.shape.formats import FORMATS
from headway.shape.model import KVGroup, ModelShape, kv_bytes, kv_read_bytes, store_as

Columns = dict[str, np.ndarray]


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
        speculation: "off", or "unrecorded" where runs with and without drafts are mixed and not told apart.
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
    speculation: str = "off"

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
        if not _experts_only(self):
            return packed
        wide = store_as(self.shape, "bf16").stored
        return msgspec.structs.replace(packed, stored=msgspec.structs.replace(wide, experts=packed.stored.experts))

    @property
    def memory(self) -> MemoryPlan:
        """Of one GPU."""
        return replica_memory(self.stored, self.hardware, self.gpus, self.attention_dp)

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


def _stored(deployment: Deployment) -> tuple[float, float]:
    """(bytes of all but routed experts, bytes of routed experts). Head and router stay in 16 bits."""
    params = deployment.shape.params
    size = FORMATS[weight_format(deployment)].width
    body_size = 2.0 if _experts_only(deployment) else size
    matrices = params.attention + params.mlp + params.shared
    return body_size * matrices + 2.0 * (deployment.shape.head_params + params.router), size * params.experts


def _experts_only(deployment: Deployment) -> bool:
    return deployment.shape.is_moe and FORMATS[weight_format(deployment)].width < 1.0


def _pairs(group: KVGroup, prompt: float) -> float:
    """Mean positions one prompt token attends to in a causal prefill."""
    mean = prompt / 2 if group.window is None else min(prompt / 2, group.window)
    return mean if group.read_limit is None else min(mean, group.read_limit)


def _peak(deployment: Deployment, precision: str) -> float:
    device = deployment.hardware
    return device.peaks[device.math_for(precision)]


def _decode_flops(deployment: Deployment) -> float:
    """Attention FLOPs of one decoded token at the mean context, states included."""
    context = deployment.prompt + deployment.output / 2
    return sum(
        group.reading_layers * group.decode_flops * (1.0 if group.kind == "state" else group.read(context))
        for group in deployment.shape.groups
    )


def _prefill_flops(deployment: Deployment) -> float:
    """Attention FLOPs of one prompt token, averaged over the prompt."""
    return sum(
        group.reading_layers
        * group.prefill_flops
        * (1.0 if group.kind == "state" else _pairs(group, deployment.prompt))
        for group in deployment.shape.groups
    )


def _cache_read(deployment: Deployment) -> float:
    """Bytes one decode step reads per sequence on one GPU, at the mean context; a state is also written."""
    shape = deployment.shape.with_kv_bytes(deployment.cache_bytes)
    states = msgspec.structs.replace(shape, groups=tuple(group for group in shape.groups if group.kind == "state"))
    context = deployment.prompt + deployment.output / 2
    return kv_read_bytes(shape, context, deployment.attention_tp) + kv_read_bytes(states, 1, deployment.attention_tp)


QUANTITIES: dict[str, Callable[[Deployment], float]] = {
    "gpus": lambda d: d.gpus,
    "attention_dp": lambda d: d.attention_dp,
    "expert_parallel": lambda d: d.expert_parallel,
    "concurrency": lambda d: d.concurrency,
    "prompt": lambda d: d.prompt,
    "output": lambda d: d.output,
    "disaggregated": lambda d: d.disaggregated,
    "unrecorded": lambda d: d.speculation == "unrecorded",
    "layers": lambda d: d.shape.layers,
    "width": lambda d: d.shape.d_model,
    "bandwidth": lambda d: d.hardware.bandwidth,
    "link": lambda d: d.hardware.link.bandwidth if d.hardware.link else np.inf,
    "peak16": lambda d: _peak(d, "bf16"),
    "body_params": lambda d: d.shape.params.body,
    "body_peak": lambda d: _peak(d, "bf16" if _experts_only(d) else d.precision),
    "body_bytes": lambda d: _stored(d)[0] / d.attention_tp,  # on one GPU
    "head_params": lambda d: d.shape.head_params,
    "moe_layers": lambda d: d.shape.moe.layers if d.shape.moe else 0,
    "experts": lambda d: d.shape.moe.experts if d.shape.moe else 1,
    "active": lambda d: d.shape.moe.active if d.shape.moe else 0,
    "expert_params": lambda d: d.shape.params.experts,  # all of them
    "expert_bytes": lambda d: _stored(d)[1] / d.gpus,  # all of them, on one GPU
    "expert_peak": lambda d: _peak(d, d.precision),
    "cache_read": _cache_read,
    "decode_flops": lambda d: _decode_flops(d) / d.attention_tp,  # per sequence on one GPU
    "prefill_flops": lambda d: _prefill_flops(d) / d.gpus,  # per prompt token on one GPU
    "capacity": lambda d: d.capacity,
}


def quantities(deployments: Sequence[Deployment]) -> Columns:
    """One column per quantity, in SI units, one entry per deployment."""
    return {name: np.array([float(of(d)) for d in deployments]) for name, of in QUANTITIES.items()}
