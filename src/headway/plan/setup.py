"""What the verbs about one replica share: the options that describe it, and what its figures rest on."""

from __future__ import annotations

from math import ceil
from typing import Any

import msgspec

from headway.core.errors import BadInput
from headway.engine.references import load_device, load_shape, profile_of
from headway.report.units import gigabytes, metric
from headway.roofline.capacity import memory_batch, memory_plan
from headway.roofline.collectives import SERVED, AllReduce, Fastest, all_reduce_of, served_all_reduce
from headway.roofline.hardware import NETWORK, Hardware
from headway.roofline.replica import Replica, Textbook, deploy, not_negative
from headway.roofline.step import can_split, check_layout
from headway.roofline.timing import Timing, served_here
from headway.roofline.work import Layout
from headway.shape.catalogue import variant_of

BOUNDS = ("textbook", "exact")
MODES = (*BOUNDS, "calibrated")
LINK_LATENCY_US = 2.0  # per hop, the third text's illustrative figure
MOST_GPUS = 1024  # of one replica; beyond that nothing is looked for
COUNTED = {  # mode -> what its steps are made of
    "textbook": "data-sheet peaks; all parameters read in every step; no launches, host or queue",
    "exact": "data-sheet peaks; the embedding gathered, heads as each GPU holds them; no launches, host or queue",
    "calibrated": "rates and overheads fitted on public runs of {engine} (--engine)",
    "measured": "rates and overheads fitted to steps of Headway on this machine; p10-p90 of steps left out of the fit",
}


class Setup(msgspec.Struct, frozen=True):
    """What is deployed on what, and in which mode it is computed: None = by the textbook, but as calibrated where the
    hardware is a measured machine and the verb can do that. A link latency or bandwidth without a kind of all-reduce
    means a ring."""

    model: str | None = None
    hardware: str | None = None
    gpus: int = 1
    precision: str | None = None
    kv: str | None = None
    math: str | None = None
    peak_tflops: float | None = None
    mode: str | None = None
    all_reduce: str | None = None
    link_latency_us: float | None = None
    link_gbs: float | None = None
    overhead_us: float = 0.0
    skew: float = 0.0
    engine: str = "vllm"
    attention_dp: int = 1
    expert_parallel: int = 1
    pipeline: int = 1

    def replica(self, modes: tuple[str, ...] = ("textbook",)) -> Replica:
        """The replica. `modes`: what the verb can compute.

        Raises:
            BadInput: any option that is impossible, named as the user wrote it.
        """
        if self.counting not in modes:
            if self.mode is None:
                raise BadInput(self._spread(), "this verb counts in textbook mode, which divides all by the GPUs")
            raise BadInput("--mode", f"{self.mode!r}; accepted by this verb: {', '.join(modes)}")
        if self.counting == "textbook" and self._spread():
            raise BadInput(self._spread(), "textbook mode divides all by the GPUs; accepted with --mode exact")
        if self.model is None:
            raise BadInput("--model", "missing; a name of `headway plan models`, a hub id, a folder, or a .gguf file")
        if self.hardware is None:
            raise BadInput("--hardware", "missing; a name of `headway plan hardware`, such as h100-sxm")
        device = load_device(self.hardware)
        replica = deploy(
            load_shape(self.model), device, self.gpus, precision=self.precision, kv=self.kv, math=self.math,
            peak=None if self.peak_tflops is None else self.peak_tflops * 1e12,
            mode=Textbook if self.counting == "textbook" else Replica,
        )  # fmt: skip
        if self.peak_tflops is not None and device.peak(replica.math) is None:
            device = msgspec.structs.replace(device, peaks=device.peaks | {replica.math: replica.pi})
            replica = msgspec.structs.replace(replica, hardware=device)
        for field, value in (("--overhead-us", self.overhead_us), ("--skew", self.skew)):
            not_negative(field, value)
        check_layout(replica.shape, self.layout)
        replica = msgspec.structs.replace(
            replica, attention_dp=self.attention_dp, expert_parallel=self.expert_parallel, pipeline=self.pipeline
        )
        reduce: AllReduce | Fastest | None = None
        if self.all_reduce == SERVED:
            if self.link_latency_us is not None or self.link_gbs is not None:
                raise BadInput("--all-reduce", f"{SERVED!r} is measured: leave out --link-latency-us and --link-gbs")
            reduce = served_all_reduce(device, self.layout.stage)
            if reduce is None:
                raise BadInput("--all-reduce", f"{SERVED!r}: {device.name} has no catalogued link")
        elif self.all_reduce or self.link_latency_us is not None or self.link_gbs is not None:
            reduce = all_reduce_of(self.all_reduce or "ring", self.link_bandwidth(device), self.link_seconds())
        return msgspec.structs.replace(replica, all_reduce=reduce, overhead=self.overhead_us * 1e-6, skew=self.skew)

    @property
    def counting(self) -> str:
        """The mode; if none was asked for "textbook", which knows no division but by all GPUs."""
        return self.mode or ("exact" if self._spread() else "textbook")

    @property
    def layout(self) -> Layout:
        return Layout(self.gpus, self.attention_dp, self.expert_parallel, self.pipeline)

    def _spread(self) -> str:
        """The first option that divides the work otherwise than by all GPUs; "" if none does."""
        named = {"attention-dp": self.attention_dp, "expert-parallel": self.expert_parallel, "pipeline": self.pipeline}
        return next((f"--{name}" for name, value in named.items() if value != 1), "")

    def measured(self, replica: Replica) -> Timing | None:
        """How long its steps take where the hardware is a measured machine and no bound was asked for; else None."""
        profile = profile_of(self.hardware or "") if self.mode in (None, "calibrated") else None
        return served_here(replica.shape, profile, replica.step_time()) if profile else None

    def needs_peak(self, replica: Replica) -> None:
        """Refuse what arithmetic decides on a device whose arithmetic is not known."""
        if replica.pi == float("inf"):
            raise BadInput("--peak-tflops", f"no peak is catalogued for {replica.hardware.name}; give its TFLOP/s")

    def link_seconds(self) -> float:
        latency = LINK_LATENCY_US if self.link_latency_us is None else self.link_latency_us
        not_negative("--link-latency-us", latency)
        return latency * 1e-6

    def link_bandwidth(self, device: Hardware) -> float:
        """B_link in bytes/s: as given, else of the device's own links."""
        if self.link_gbs is not None:
            if not 0 < self.link_gbs < float("inf"):
                raise BadInput("--link-gbs", f"{self.link_gbs}; accepted: a number above 0")
            return self.link_gbs * 1e9
        if device.link is None:
            raise BadInput("--link-gbs", f"{device.name} has no catalogued link; give its GB/s per direction")
        return device.reach(self.layout.stage)

    def about(
        self, replica: Replica, notes: tuple[str, ...] = (), assumptions: tuple[str, ...] = (), counted: str = "",
        longest: float = 0,
    ) -> dict[str, Any]:  # fmt: skip
        """The fields of `Answer`: this verb's notes and assumptions, then those of every verb. `counted`: the mode
        that made the figures, where it is not the one asked for. `longest`: tokens of a sequence."""
        if 0 < replica.shape.context < longest:
            notes = (f"{longest:,.0f} tokens are beyond the {replica.shape.context:,} the model was made for", *notes)
        return {
            "model": replica.shape.name, "hardware": replica.hardware.name, "gpus": replica.gpus,
            "precision": replica.precision, "kv_bytes_per_number": replica.shape.kv_width, "math": replica.math,
            "mode": self.counting, "memory": memory_plan(replica), "notes": [*notes, *self._notes(replica)],
            "assumptions": [*assumptions, *self._assumptions(replica, counted or self.counting)],
        }  # fmt: skip

    def _notes(self, replica: Replica) -> list[str]:
        notes, device, gpus = [], replica.hardware, replica.gpus
        variant = variant_of(self.model) if self.model and "/" in self.model else None
        if variant is not None and variant.model == replica.shape.name:
            notes.append(f"{self.model}: {variant.model} in {replica.shape.weight_format} weights, by its name")
        if unread := replica.shape.unread:
            notes.append(f"its config has fields that are not known here and may change its shape: {', '.join(unread)}")
        if (
            self.counting == "textbook"
            and self.precision is not None
            and replica.weights
            < 0.9
            * (
                kept := deploy(
                    load_shape(self.model or ""), device, gpus, precision=self.precision, mode=Replica
                ).weights
            )
        ):
            notes.append(
                f"the textbook puts all {replica.shape.n_params / 1e9:.3g}B parameters in {replica.precision}, "
                f"{gigabytes(replica.weights)}; checkpoints keep embedding and head, {gigabytes(kept)}: --mode exact"
            )
        if device.link and gpus > device.link.group:
            notes.append(
                f"{gpus} GPUs are {ceil(gpus / device.link.group)} nodes of {device.link.group}, with "
                f"{metric(NETWORK, 'B/s')} per GPU between them"
            )
        if replica.pi == float("inf"):
            notes.append(f"{device.name} has no catalogued peak: arithmetic is left out, only memory is modelled")
        if device.measured:
            notes.append(f"{device.measured:.0%} of this bandwidth was measured on {device.name}")
        latent = any(group.kind == "latent" for group in replica.shape.groups)
        if latent and replica.attention_dp == 1 and gpus > 1 and self.counting != "textbook":
            notes.append("the whole latent cache is on each GPU; data-parallel attention (--attention-dp) divides it")
        if self.counting == "textbook" and gpus > (1 if latent else replica.shape.kv_heads):
            held = "its latent cache" if latent else f"some of its {replica.shape.kv_heads} KV heads"
            notes.append(
                f"the cache is divided by {gpus} here, but every GPU holds {held}: --mode exact says what fits"
            )
        return notes

    def _assumptions(self, replica: Replica, mode: str) -> list[str]:
        device = replica.hardware
        peak = "" if replica.pi == float("inf") else f", {metric(replica.pi, 'FLOP/s')} in {replica.math}"
        spread = {
            "stages (--pipeline)": replica.pipeline, "groups with sequences of their own (--attention-dp)":
            replica.attention_dp, "groups with experts of their own (--expert-parallel)": replica.expert_parallel,
        }  # fmt: skip
        split = [f"{value} {what}" for what, value in spread.items() if value > 1]
        lines = [
            *([f"{replica.gpus} GPUs as {', '.join(split)}"] if split else []),
            f"{device.name}: {gigabytes(device.usable)} at {metric(device.bandwidth, 'B/s')}{peak} ({device.date})",
            COUNTED[mode].format(engine=self.engine),
        ]
        if replica.gpus > 1 and mode != "calibrated":
            reduce = replica.all_reduce
            if self.all_reduce == SERVED:
                return [
                    *lines,
                    "all-reduces: as measured in engines' captured graphs on such links (docs/collectives.md)",
                ]
            lines.append(
                f"all-reduces: {self.all_reduce or 'ring'}, {self.link_seconds() * 1e6:g} us per hop, "
                f"{metric(self.link_bandwidth(device), 'B/s')} (--link-latency-us, --link-gbs)"
                if reduce
                else "all-reduces between the GPUs are not counted (--all-reduce ring counts them)"
            )
        return lines


def whole_from(least: int, field: str, value: int) -> None:
    """Refuse anything below `least`."""
    if value < least:
        raise BadInput(field, f"{value}; accepted: a whole number from {least}")


def gpus_needed(replica: Replica, context: float, batch: int = 1, reserve: float = 0.0) -> int | None:
    """Fewest GPUs, of the numbers the model can be split over, that hold its weights and the caches of `batch`
    sequences; None if `MOST_GPUS` do not."""
    for gpus in range(1, MOST_GPUS + 1):
        fewer = msgspec.structs.replace(replica, gpus=gpus)
        if can_split(replica.shape, gpus) and memory_batch(fewer, context, reserve) >= batch:
            return gpus
    return None
