"""The constants of the calibrated model: what each is, its prior, and how it may differ between engines and chips.

A constant is its typical value moved by a sum of offsets: one for all deployments and one per label of each of its
levels (engine, hardware family, engine on a family, number format...). Each offset is drawn towards 0 by a normal
prior, so a level with no evidence keeps the typical value and a level with much evidence may leave it. Dense models
and mixtures have a set each. There is no level for a model: nothing here can remember a checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import msgspec
import numpy as np

from headway.roofline.deployment import Deployment

# kind of model -> constant -> level label ("" = all) -> offset of the logarithm
Offsets = Mapping[str, Mapping[str, Mapping[str, float]]]

FAMILIES = {"h100": "hopper", "h200": "hopper", "h20": "hopper", "b200": "blackwell", "b300": "blackwell",
            "gb200": "blackwell", "gb300": "blackwell"}  # fmt: skip


def family(name: str) -> str:
    """Hardware family of a device; devices without measured runs are their own."""
    return FAMILIES.get(name.split("-")[0], name)


def _attention(deployment: Deployment) -> str:
    kinds = {group.kind for group in deployment.shape.groups}
    return "latent" if "latent" in kinds else "state" if "state" in kinds else "full"


def _recipe(deployment: Deployment) -> str | None:
    """Whose recipe decided about drafts, for runs that do not say: the release, or the split of a decode worker."""
    if deployment.drafts is not None:
        return None
    if not deployment.disaggregated:
        return f"{deployment.engine} {deployment.version}"
    split = "dp" if deployment.attention_dp > 1 else "ep" if deployment.expert_parallel > 1 else "tp"
    return f"{deployment.engine} disaggregated {split}"


LEVELS: dict[str, Callable[[Deployment], str | None]] = {
    "engine": lambda d: d.engine,
    "family": lambda d: family(d.hardware.name),
    "engine_family": lambda d: f"{d.engine} {family(d.hardware.name)}",
    "precision": lambda d: d.measured,
    "precision_family": lambda d: f"{d.measured} {family(d.hardware.name)}",
    "attention": _attention,
    "recipe": _recipe,
    "mode": lambda d: "disaggregated" if d.disaggregated else "aggregated",
}


class Constant(msgspec.Struct, frozen=True):
    """One constant: its typical value (per number format where it differs), prior spread of the common offset
    (0 = none), levels, meaning with unit, and scale: "ratio" is typical * exp(offsets); "share" the same near its
    typical value but never above 1; "log" is the sum of offsets itself."""

    name: str
    meaning: str
    typical: float | dict[str, float]
    spread: float
    levels: tuple[str, ...] = ()
    scale: str = "ratio"

    def value(self, typical: np.ndarray, offset: np.ndarray) -> np.ndarray:
        """The constant at a sum of offsets."""
        if self.scale == "log":
            return offset
        if self.scale == "share":  # logistic, with the slope of the exponential at the typical value
            return 1 / (1 + (1 / typical - 1) * np.exp(-offset / (1 - typical)))
        return typical * np.exp(offset)


_LINEAR = {"bf16": 0.75, "fp8": 0.55, "fp4": 0.45, "int4": 0.5}
_ROUTED = {"bf16": 0.5, "fp8": 0.35, "fp4": 0.25, "int4": 0.3}
_ENGINE = ("engine",)
_BOTH = ("engine", "family")
_EACH = ("engine", "family", "engine_family")
CONSTANTS = (
    Constant("stream", "share of memory bandwidth, reading weights", 0.8, 0.15, _EACH, "share"),
    Constant("stream_experts", "share of it, reading routed experts", 0.6, 0.3, (*_EACH, "precision_family"), "share"),
    Constant("stream_cache", "share of it, reading KV cache", 0.6, 0.3, _EACH, "share"),
    Constant("linear", "share of peak arithmetic in matrices", _LINEAR, 0.2, (*_EACH, "precision"), "share"),
    Constant("expert_linear", "share of it in routed experts", _ROUTED, 0.3, (*_BOTH, "precision"), "share"),
    Constant("attention", "share of peak 16-bit arithmetic in decode attention", 0.4, 0.3, _ENGINE, "share"),
    Constant("prefill_attention", "share of it in prompt attention", 0.5, 0.3, ("family",), "share"),
    Constant("link", "share of link bandwidth in all-reduce", 0.5, 0.3, _BOTH, "share"),
    Constant("hop", "seconds of an all-reduce, latency", 6e-6, 0.4, _BOTH),
    Constant("hop_growth", "growth of that latency per doubling of GPUs", 0.3, 0.5),
    Constant("node_hop", "that latency between nodes, over that inside one", 4.0, 0.5),
    Constant("layer", "seconds per layer and step: launches and gaps", 32e-6, 0.2, (*_BOTH, "attention")),
    Constant("moe_layer", "seconds more per mixture layer: routing, grouping", 20e-6, 0.6, _EACH),
    Constant("step", "seconds per step on the host", 150e-6, 0.3, _ENGINE),
    Constant("row", "seconds per sequence and step on the host", 5e-6, 0.7, _ENGINE),
    Constant("eager", "seconds per layer to launch a step with prompt tokens", 100e-6, 0.7, _ENGINE),
    Constant("interference", "prompt tokens beside a decode step, over c * prompt / output", 0.95, 0.1, _ENGINE),
    Constant("prompting", "time of a prompt over that of its steps by themselves", 1.3, 0.4, _ENGINE),
    Constant("mixing", "odds that prompt pieces share a step with decodes", 1.0, 1.0, _ENGINE),
    Constant("overlap", "of reading or arithmetic, hidden behind the other where both are equal",
             0.75, 0.2, scale="share"),
    Constant("spread", "experts touched over those of independent tokens, as tokens", 0.8, 0.3, (), "share"),
    Constant("permute", "passes over the tokens' copies around routed experts", 3.0, 0.5, _ENGINE),
    Constant("tile", "rows an expert's matrices are padded by", 4.0, 0.5),
    Constant("imbalance", "busiest GPU over the mean under expert parallelism", 1.1, 0.15, _ENGINE),
    Constant("acceptance", "probability that a drafted token is accepted", 0.75, 0.2, (), "share"),
    Constant("draft", "seconds of drafting a token, over a step's", 0.04, 0.5),
    Constant("speculation", "log of the gain of drafts where runs do not say if they drafted", 0.0, 0.3,
             ("engine", "recipe"), scale="log"),
)  # fmt: skip
_MODE = ("mode", "engine")
FIRST_TOKEN = (
    Constant("prompt_extra", "time of the own prompt beyond its time alone, over that", 0.4, 0.7, _MODE),
    Constant("queue", "wait for other prompts over that of a random arrival", 1.0, 0.3, _MODE),
    Constant("burst", "share of the opening burst in the mean", 0.15, 0.6, _MODE),
    Constant("admission", "wait for cache room over a full turn of the waiting", 0.7, 0.5, _MODE),
    Constant("front", "seconds per request in front of the engine", 0.02, 0.7, _MODE),
    Constant("front_row", "seconds per request in flight, in front of the engine", 3e-4, 0.8, _MODE),
)
ALL = CONSTANTS + FIRST_TOKEN
# Of a bound: no interference beyond what cannot overlap, and nothing besides the own prompt.
IDEAL = {
    "prompting": 1.0, "interference": 0.0, "mixing": 1e9, "acceptance": 1.0 - 1e-9, "draft": 0.0, "speculation": 0.0,
    "prompt_extra": 0.0, "queue": 0.0, "burst": 0.0, "admission": 0.0, "front": 0.0, "front_row": 0.0,
}  # fmt: skip


def labels(deployments: Sequence[Deployment]) -> dict[str, list[str]]:
    """Level -> the label of each deployment ("kind=moe"); "" where the level does not apply."""
    found = {level: [of(deployment) for deployment in deployments] for level, of in LEVELS.items()}
    return {level: ["" if label is None else f"{level}={label}" for label in row] for level, row in found.items()}


def typical(constant: Constant, deployments: Sequence[Deployment]) -> np.ndarray:
    """The prior's value for each deployment."""
    value = constant.typical
    if isinstance(value, float):
        return np.full(len(deployments), value)
    return np.array([value[deployment.measured] for deployment in deployments])


def resolve(offsets: Offsets, deployments: Sequence[Deployment]) -> dict[str, np.ndarray]:
    """Every constant for each deployment, from the fitted offsets."""
    names = labels(deployments)
    resolved = {}
    for constant in ALL:
        tables = [offsets[deployment.kind][constant.name] for deployment in deployments]
        total = np.array([table.get("", 0.0) for table in tables])
        for level in constant.levels:
            total += [
                table.get(label, 0.0) if label else 0.0 for table, label in zip(tables, names[level], strict=True)
            ]
        resolved[constant.name] = constant.value(typical(constant, deployments), total)
    return resolved
