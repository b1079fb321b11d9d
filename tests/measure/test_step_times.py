"""Which prediction an engine gets: the estimate where its format was timed, else the bound, and it says which."""

from __future__ import annotations

import itertools
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from headway.core.errors import BadInput
from headway.engine.profile import held_formats, step_time
from headway.measure import checkup, formats, synthetic
from headway.measure.formats import fit_formats
from headway.measure.patience import Patience
from headway.measure.trial import Point, observe
from headway.model.rope import inverse_frequencies, rope
from headway.ops import native
from headway.ops.native.backend import NativeBackend
from headway.ops.reference import ReferenceBackend
from headway.roofline.profile import Fit, Profile, Rates, device_of
from headway.roofline.step import Efficiency, StepTime, decode_step
from headway.roofline.timing import Timing, estimate
from headway.shape.catalogue import find_model

needs_native = pytest.mark.skipif(not native.available(), reason="the compiled module is missing")
MEASURED = Efficiency(stream=0.9, linear=0.5, overlap=0.8, step=1e-4)
BODY = Fit(MEASURED, "fp32", 1e11, 0.9, 1.2, 0.04, (2e10, 3e10, 4e10), 70)
PROFILE = Profile(
    "box", "2026-01-01", 2, 8e9, {"2": 4e10}, {"fp32": 1e11, "int8": 4e11}, {"reference": {"f32": [BODY]}}
)
TINY = replace(
    synthetic.NARROW, layers=2, heads=4, kv_heads=2, head_dim=8, hidden_size=32, intermediate_size=64, vocab_size=64,
    rope=rope(inverse_frequencies(8, 10000.0)),
)  # fmt: skip


def tiny():
    backend = ReferenceBackend()
    return backend, *synthetic.synthetic(TINY, "tiny", backend, "f32")


def test_a_timed_format_gives_an_estimate_and_its_range() -> None:
    backend, _, shape = tiny()
    found = step_time(shape, PROFILE, backend)
    assert (found.label, found.low, found.high, found.reason) == ("estimate", 0.9, 1.2, "")
    assert found.model.hardware.bandwidth == 3e10  # the usual one while steps were timed
    now = step_time(shape, PROFILE, backend, Rates(1e10, 9e10)).model.hardware  # of this moment
    assert (now.bandwidth, now.peaks["fp32"]) == (1e10, 9e10)
    assert "-10% to +20%" in found.text()


def test_an_untimed_format_gives_the_bound_and_says_why() -> None:
    backend, _, shape = tiny()
    found = step_time(shape, replace_fits(PROFILE), backend)
    assert found.label == "bound" and "reference backend on f32" in found.reason and "headway probe" in found.text()
    step = decode_step(shape, 1, 16)
    assert found.model.predict(step) < step_time(shape, PROFILE, backend).model.predict(step)


def replace_fits(profile: Profile, **fits: dict[str, list[Fit]]) -> Profile:
    return Profile(profile.name, profile.created, 2, 8e9, profile.read_bandwidth, profile.rates, fits)


def test_a_profile_without_the_backends_arithmetic_is_refused() -> None:
    backend, _, shape = tiny()
    with pytest.raises(BadInput, match="no fp32 rate"):
        step_time(shape, Profile("box", "2026-01-01", 2, 8e9, {"2": 4e10}, {"int8": 1e11}), backend)


def test_a_head_in_another_format_has_its_own_rates() -> None:
    """A quarter of four times the peak is the whole of it."""
    head = Fit(Efficiency(stream=0.7, linear=0.25), "int8", 4e11, 0.9, 1.2, 0.04, (2e10, 3e10, 4e10), 70)
    found = estimate(tiny()[2], replace_fits(PROFILE, native={"a": [BODY], "b": [head]}), "native", ("a", "b"))
    assert found is not None and found.model.efficiency is not None
    assert found.model.efficiency.head_stream == 0.7
    assert found.model.efficiency.head_linear == pytest.approx(1.0)
    assert found.model.efficiency.linear == 0.5


@needs_native
@pytest.mark.parametrize(
    ("weights", "group", "held"),
    [("stored", None, ("q4_1", "bf16")), ("int8", None, ("q4_1", "int8/128")), ("int4", 64, ("q4_1", "int8/64"))],
)
def test_a_backend_names_the_format_it_holds_a_matrix_in(weights, group, held) -> None:
    """Block formats stay what they are; 16-bit ones become what --weights says, the head always 8 bits."""
    backend = NativeBackend(1, weights, group)
    assert (backend.held_as("q4_1"), backend.held_as("bf16", head=True)) == held


def test_a_trial_runs_the_step_it_was_asked_for() -> None:
    """Two decodes at context 128 beside a prompt of 32."""
    _, trial, _ = tiny()
    point = Point(2, 128, 32)
    size, seconds = trial.run(point)
    assert (size.tokens, size.rows, size.logit_rows) == (34, 3, 3)
    assert size.decode_kv_tokens == (256,) and size.kv_tokens == (256 + 32,)
    assert seconds > 0 and trial.run(point)[0] == size
    behind, _ = trial.run(Point(2, 128, 32, 1536))
    assert behind.kv_tokens == (256 + 1536 + 32,) and behind.pairs[0] > 32 * 1536


def test_steps_are_left_out_where_the_machine_changed_its_speed() -> None:
    _, trial, shape = tiny()
    model = StepTime(shape, step_time(shape, PROFILE, ReferenceBackend()).model.hardware, math="fp32")
    rates = iter([Rates(1e10, 1e11), Rates(1e10, 1e11), Rates(3e10, 1e11), Rates(3e10, 2e11), Rates(3e10, 2e11)])
    found = observe(trial, model, [Point(1, 128)], lambda: next(rates), 4)
    assert [one.bandwidth for one in found] == pytest.approx([1e10, 3e10])
    assert [one.peak for one in found] == pytest.approx([1e11, 2e11])


def test_a_point_without_a_steady_step_keeps_the_others() -> None:
    _, trial, shape = tiny()
    model = StepTime(shape, step_time(shape, PROFILE, ReferenceBackend()).model.hardware, math="fp32")
    rates = iter([Rates(1e10, 1e11), Rates(4e10, 1e11)])
    assert [one.bandwidth for one in observe(trial, model, [Point(1, 128)], lambda: next(rates), 1)] == [2e10]


def test_the_fit_of_the_regime_is_taken() -> None:
    fast = Fit(Efficiency(linear=0.3), "fp32", 1e11, 0.8, 1.3, 0.05, (5e10, 6e10, 7e10), 20)
    profile = replace_fits(PROFILE, reference={"f32": [BODY, fast]})
    backend, _, shape = tiny()
    assert step_time(shape, profile, backend, Rates(5e10, 1e11)).low == 0.8
    assert step_time(shape, profile, backend, Rates(3.2e10, 1e11)).low == 0.9
    assert step_time(shape, profile, backend).low == 0.9  # where it was most often


def test_fits_are_added_to_a_profile(monkeypatch: pytest.MonkeyPatch) -> None:
    """On models small enough for a test."""
    monkeypatch.setattr(synthetic, "SIZES", (("narrow", TINY), ("wide", replace(TINY, hidden_size=64, layers=1))))
    monkeypatch.setattr(synthetic, "ROUNDS", 2)
    monkeypatch.setattr(formats, "PROBE_BYTES", 1 << 20)
    told: list[str] = []
    found = fit_formats(replace_fits(PROFILE), "reference", ["f32"], lambda what, done, total: told.append(what))
    fitted = found.fits["reference"]["f32"][0]
    assert fitted.math == "fp32" and fitted.low <= 1 <= fitted.high and all(what.endswith("f32") for what in told)
    assert step_time(tiny()[2], found, ReferenceBackend()).label == "estimate"


def test_a_busy_machine_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was measured until then stays; the rest is named."""
    monkeypatch.setattr(synthetic, "SIZES", (("narrow", TINY), ("wide", TINY)))
    monkeypatch.setattr(formats, "PROBE_BYTES", 1 << 20)
    ticks = itertools.count()
    patience = Patience(idle=10, now=lambda: float(next(ticks)))
    profile = fit_formats(replace_fits(PROFILE), "reference", ["f32"], patience=patience)
    assert not profile.fits and patience.over and next(ticks) < 40
    assert patience.sentence("f32") == "f32: not measured, for the machine was busy: 30 s had passed"
    _, trial, shape = tiny()
    model = StepTime(shape, step_time(shape, PROFILE, ReferenceBackend()).model.hardware, math="fp32")
    steady, later = Rates(1e10, 1e11), Patience(idle=1, now=itertools.count().__next__)
    assert len(observe(trial, model, [Point(1, 128)], lambda: steady, 10, patience=later)) == 3


@needs_native
def test_an_unknown_format_is_refused() -> None:
    with pytest.raises(BadInput, match="'q9_9' is not a weight format"):
        fit_formats(PROFILE, "native", ["q9_9"])


def test_the_formats_held_come_from_the_shape() -> None:
    backend, _, shape = tiny()
    assert held_formats(shape, backend) == ("f32", "f32")


def test_what_cannot_be_measured_is_said() -> None:
    loaded: Any = SimpleNamespace(info=SimpleNamespace(context_length=2048), shape=tiny()[2])
    assert checkup._not_measured(loaded, [], 4096) == "the model's context ends at 2048 tokens"
    assert checkup._not_measured(loaded, [Point(1, 16)], 16) == ""
    assert "at context 1000000000000 would take" in checkup._not_measured(loaded, [Point(1, 10**12)], 10**12)


def test_many_steps_take_what_the_profile_says_of_the_mean() -> None:
    found = Timing(
        StepTime(find_model("llama-3.2-1b"), device_of(PROFILE), math="fp32", efficiency=MEASURED),
        "estimate",
        0.9,
        1.4,
        "",
        mean=1.1,
    )
    step = decode_step(found.model.shape, 4, 100)
    assert found.of_many.model.predict(step) == pytest.approx(1.1 * found.model.predict(step))
    assert (found.of_many.low, found.of_many.high) == pytest.approx((0.9 / 1.1, 1.4 / 1.1))
    bound = Timing.bound(found.model, "no steps")
    assert bound.of_many is bound
