"""What `headway doctor` says: the machine as this process sees it, measured; what a model should do on it, and does."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from statistics import median

import msgspec

from headway.core.errors import BadInput
from headway.engine import profile as profiles
from headway.engine.backends import make_backend
from headway.engine.machine import free_memory, isa, usable_cores
from headway.engine.profile import held_formats, saved_profile, step_time
from headway.measure.doubts import Waiting, doubts
from headway.measure.fit import Observation
from headway.measure.formats import fit_formats, for_regime, machine_probe, measure_machine
from headway.measure.patience import Patience
from headway.measure.probe import save_profile
from headway.measure.synthetic import ROUNDS, SECONDS, steps
from headway.measure.trial import BLOCK, Point, Trial, observe
from headway.model.load import Model, load
from headway.model.source import DEFAULT_MODEL, Progress
from headway.ops.protocol import Backend
from headway.roofline.hardware import GIB
from headway.roofline.profile import Profile, Rates
from headway.roofline.step import StepTime, decode_step, prefill_step
from headway.roofline.timing import Timing
from headway.shape.model import kv_bytes

BATCHES = (1, 8, 32)
PROMPT = 512
IDLE = 30.0  # seconds that all but fits take on an idle machine
FITS = 2  # that a model may need: of its matrices and its head
ROOM = 1.1  # bytes a measurement may need over what its cache takes


class Prediction(msgspec.Struct, frozen=True, kw_only=True):
    """What a size of step should reach, and did.

    Attributes:
        point: "decode" or "prefill". batch: requests decoding together, or prompts.
        tokens_per_second: predicted, over all requests: an estimate, or a bound where the label says so. Where it was
            measured too, the prediction is for the memory bandwidth and arithmetic of the same moments.
        low, high: 80 % of single steps are expected between.
        bound: tokens/s that memory and arithmetic allow at most. binds: "memory" or "compute".
        measured: tokens/s of real steps, median; None if none were run.
        predicted_over_measured: median over them.
    """

    point: str
    batch: int
    label: str
    tokens_per_second: float
    low: float
    high: float
    bound: float
    binds: str
    measured: float | None = None
    predicted_over_measured: float | None = None

    def text(self) -> str:
        """For people."""
        if self.label == "bound":
            said = f"at most {self.tokens_per_second:.0f} tokens/s (a bound; {self.binds} binds)"
        else:
            said = (
                f"{self.tokens_per_second:.0f} tokens/s, {self.low:.0f} to {self.high:.0f} "
                f"(at most {self.bound:.0f}; {self.binds} binds)"
            )
        if self.measured is None or self.predicted_over_measured is None:
            return said
        return f"{said}; measured {self.measured:.0f}, predicted/measured {self.predicted_over_measured:.2f}"


class Checkup(msgspec.Struct, frozen=True):
    """The machine and a model on it. Rates in bytes/s and FLOP/s.

    Attributes:
        label: "estimate" or "bound": what the predictions are; `reason` says why only a bound.
        bandwidth_now: bytes/s that memory gave when the predictions were made.
        not_measured: what was not, and why; "" = all was.
        kept: where what was measured lies for steps to be predicted by, or why it does not; "" = nothing was new.
    """

    isa: list[str]
    threads: int
    free_memory: int
    read_bandwidth: dict[str, float]
    rates: dict[str, float]
    backend: str
    model: str
    weight_bytes: int
    kv_bytes_per_token: float
    context: int
    label: str
    reason: str
    bandwidth_now: float
    decode: list[Prediction]
    prefill: Prediction
    not_measured: str = ""
    kept: str = ""

    def lines(self) -> list[tuple[str, str]]:
        """(label, text) pairs to print."""
        bandwidth = ", ".join(f"{rate / 1e9:.1f} GB/s on {n}" for n, rate in self.read_bandwidth.items())
        rates = ", ".join(f"{name} {rate / 1e9:.0f} GFLOP/s" for name, rate in self.rates.items())
        said = "estimates with the range of 80 % of steps" if self.label == "estimate" else f"bounds: {self.reason}"
        return [
            ("instruction sets", " ".join(self.isa)),
            ("threads", f"{self.threads} (affinity and container quota considered)"),
            ("free memory", f"{self.free_memory / GIB:.1f} GiB"),
            ("read bandwidth", f"{bandwidth} threads; {self.bandwidth_now / 1e9:.1f} GB/s when predicting"),
            ("arithmetic", rates),
            ("model", f"{self.model} on the {self.backend} backend"),
            ("weights", f"{self.weight_bytes / GIB:.2f} GiB, cache {self.kv_bytes_per_token / 1024:.1f} KiB per token"),
            ("predictions", f"{said}, at context {self.context}"),
            *((f"decode, batch {one.batch}", one.text()) for one in self.decode),
            (f"prefill of {PROMPT}", self.prefill.text()),
            *([("not measured", self.not_measured)] if self.not_measured else []),
            *([("kept", self.kept)] if self.kept else []),
        ]


def checkup(
    model: str | None, context: int, threads: int | None, backend: str, real: bool = True, rounds: int = ROUNDS,
    report: Progress = lambda what, done, total: None,
) -> Checkup:  # fmt: skip
    """Measure the machine, load the model, predict, and run a few real steps beside the predictions. What was not
    measured before is saved as by `headway probe`.

    Args:
        real: run them.
        rounds: how often each size of step is timed.
        report: told what is being done, and how far it is.

    Raises:
        BadInput: an argument is out of range.
    """
    if context < 1:
        raise BadInput("--context", f"{context} is not an integer >= 1")
    cores = threads or usable_cores()
    free = free_memory()
    device = make_backend(backend, cores)
    report("loading the model", 0, None)
    loaded = load(DEFAULT_MODEL if model is None else model, device, room=free)
    report("measuring memory bandwidth and arithmetic", 0, None)
    waiting = Waiting()
    patience = Patience(IDLE + FITS * steps(rounds) * SECONDS)
    profile = _with_fits(measure_machine(cores), device, loaded, report, rounds, patience)
    probe = machine_probe(cores, device.math)
    now = began = probe()
    said = step_time(loaded.shape, profile, device, now)
    points = [*(Point(batch, context) for batch in BATCHES), Point(0, context, PROMPT)]
    points = [point for point in points if max(point.context, point.chunk) < loaded.info.context_length]
    missing = _not_measured(loaded, points, context) if real else "not asked for"
    found: list[Observation] = []
    if not missing:
        found = _real_steps(device, loaded, said.model, points, probe, report, rounds, patience)
        seen = {one.point for one in found}
        names = [point.name for point in points if f"{loaded.shape.name}: {point.name}" not in seen]
        missing = patience.sentence(", ".join(names)) if names else ""
    if found:
        speed = median(one.bandwidth for one in found)
        profile = for_regime(profile, device, loaded.shape, speed, report, rounds, patience)
        now = Rates(median(one.bandwidth for one in found), median(one.peak for one in found))
        said = step_time(loaded.shape, profile, device, now)
    whole = cores == usable_cores()  # or it says nothing of the machine
    kept = _keep(profile, device.name, waiting.share(), (began, probe())) if whole else ""
    best = max(now.bandwidth, profile.bandwidth)
    machine = msgspec.structs.replace(said.model.hardware, bandwidth=best, peaks=profile.rates)
    roof = StepTime(loaded.shape, machine, math=said.model.math)

    def predicted(point: Point) -> Prediction:
        own = [one for one in found if one.point == f"{loaded.shape.name}: {point.name}"]
        then = [step_time(loaded.shape, profile, device, Rates(one.bandwidth, one.peak)) for one in own]
        pairs = [(at.model.seconds(one.work), one.seconds) for at, one in zip(then, own, strict=True)]
        return _prediction(said, roof, point, pairs)

    decode = [predicted(Point(batch, context)) for batch in BATCHES]
    prefill = predicted(Point(0, context, PROMPT))
    return Checkup(
        isa=isa(),
        threads=cores,
        free_memory=free,
        read_bandwidth=profile.read_bandwidth,
        rates=profile.rates,
        backend=device.name,
        model=loaded.info.name,
        weight_bytes=device.weight_bytes,
        kv_bytes_per_token=kv_bytes(loaded.shape.groups, 1),
        context=context,
        label=said.label,
        reason=said.reason,
        bandwidth_now=now.bandwidth,
        decode=decode,
        prefill=prefill,
        not_measured=missing,
        kept=kept,
    )


def _keep(profile: Profile, backend: str, waited: float, probes: Sequence[Rates]) -> str:
    """Save a profile with fits that the saved one has not, unless it is doubtful -> `Checkup.kept`."""
    saved = saved_profile()
    if saved is not None and saved.fits == profile.fits:
        return ""
    known = {} if saved is None else saved.fits.get(backend, {})
    fresh = [name for name, fits in profile.fits.get(backend, {}).items() if known.get(name) != fits]
    if reasons := doubts(profile, fresh, backend, waited, probes):
        return f"nothing: {'; '.join(reasons)}"
    save_profile(profile, profiles.profile_path())
    return f"{profiles.profile_path()}: steps are predicted by it from now on"


def _with_fits(
    profile: Profile, device: Backend, loaded: Model, report: Progress, rounds: int, patience: Patience
) -> Profile:
    """With the saved fits, and those that this model needs besides, measured now."""
    saved = saved_profile()
    if saved is not None and saved.threads == profile.threads:
        profile = msgspec.structs.replace(profile, fits=saved.fits)
    known = profile.fits.get(device.name, {})
    missing = [format for format in dict.fromkeys(held_formats(loaded.shape, device)) if format not in known]
    return fit_formats(profile, device.name, missing, report, rounds, patience) if missing else profile


def _not_measured(loaded: Model, points: list[Point], context: int) -> str:
    """Why no real step can be run; "" if they can."""
    if not points:
        return f"the model's context ends at {loaded.info.context_length} tokens"
    needed = ROOM * kv_bytes(loaded.shape.groups, 1) * (max(BATCHES) * (context + BLOCK) + PROMPT)
    if needed > free_memory():
        return f"the cache of {max(BATCHES)} requests at context {context} would take {needed / GIB:.1f} GiB"
    return ""


def _real_steps(
    device: Backend, loaded: Model, model: StepTime, points: list[Point], probe: Callable[[], Rates],
    report: Progress, rounds: int, patience: Patience,
) -> list[Observation]:  # fmt: skip
    trial = Trial(device, loaded.forward, loaded.shape, points)
    done, total = itertools.count(1), len(points) * (rounds + 1)

    def one_more() -> None:
        report(f"running real steps of {loaded.info.name}", next(done), total)

    for point in points:
        if not patience.over:
            trial.run(point)  # buffers grow once
            one_more()
    found = observe(trial, model, points, probe, rounds, one_more, patience)
    trial.close()
    return found


def _prediction(said: Timing, roof: StepTime, point: Point, pairs: list[tuple[float, float]]) -> Prediction:
    """pairs: (predicted, measured) seconds of real steps."""
    shape = said.model.shape
    size = prefill_step(shape, point.chunk) if point.chunk else decode_step(shape, point.rows, point.context)
    tokens = point.chunk or point.rows
    bound = roof.explain(size)
    seconds = said.model.predict(size)
    if pairs and said.label == "estimate":
        seconds = median(predicted for predicted, _ in pairs)
    return Prediction(
        point="prefill" if point.chunk else "decode",
        batch=max(point.rows, 1),
        label=said.label,
        tokens_per_second=tokens / seconds,
        low=tokens / seconds / said.high,
        high=max(tokens / seconds, min(tokens / seconds / said.low, tokens / bound.seconds)),
        bound=tokens / bound.seconds,
        binds=bound.binds,
        measured=tokens / median(took for _, took in pairs) if pairs else None,
        predicted_over_measured=median(took / predicted for predicted, took in pairs) if pairs else None,
    )
