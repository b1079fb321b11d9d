"""Constants are recovered from steps whose constants are known, noise and all, and the range holds what it says."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from headway.core.errors import BadInput
from headway.measure.fit import TYPICAL, Observation, fit, fit_regimes, residual_of
from headway.measure.probe import save_profile
from headway.roofline.hardware import find_hardware
from headway.roofline.profile import Profile, load_profile, nearest
from headway.roofline.step import Efficiency, StepTime, decode_step, limited, mixed_step, prefill_step
from headway.roofline.work import StepWork
from headway.shape.catalogue import find_model
from headway.shape.model import ModelShape

PEAK, BETA = 9e11, 5e10
TRUE = Efficiency(
    stream=0.92, ceiling=7e10, linear=0.7, stream_cache=0.6, attention=0.12, prefill_attention=0.2, overlap=0.75,
    step=3e-4, layer=3e-5, row=2e-5, element=4e-9, logit=1e-9,
)  # fmt: skip
SMALL = msgspec.structs.replace(find_model("llama-3.2-1b"), name="a")
NARROW = msgspec.structs.replace(
    SMALL, name="b", layers=4, d_model=1024,
    params=msgspec.convert({k: v / 16 for k, v in msgspec.to_builtins(SMALL.params).items()}, type(SMALL.params)),
    stored=msgspec.convert({k: v / 16 for k, v in msgspec.to_builtins(SMALL.stored).items()}, type(SMALL.stored)),
)  # fmt: skip


def works(shape: ModelShape) -> dict[str, StepWork]:
    """What steps of many sizes have to do."""
    model = StepTime(shape, find_hardware("h100-sxm"))
    sizes = {f"decode {rows} at {at}": decode_step(shape, rows, at) for rows in (1, 4, 8, 32) for at in (128, 1024)}
    sizes |= {f"prefill {tokens}": prefill_step(shape, tokens) for tokens in (32, 128, 512)}
    sizes["mixed"] = mixed_step(decode_step(shape, 8, 128), prefill_step(shape, 64))
    return {f"{shape.name}: {name}": model.work(size) for name, size in sizes.items()}


def measured(noise: float, outliers: float = 0.0, seed: int = 0, repeats: int = 4) -> list[Observation]:
    """Steps that take what `TRUE` says, in memory that is slow or fast, with noise and a share of steps 3x too long."""
    rng = np.random.default_rng(seed)
    found = []
    for name, work in (works(SMALL) | works(NARROW)).items():
        for _ in range(repeats):
            beta = BETA * rng.choice([0.6, 1.0])
            seconds = TRUE.seconds(work, PEAK, beta) * np.exp(noise * rng.normal())
            found.append(
                Observation(work, float(beta), PEAK, seconds * (3.0 if rng.random() < outliers else 1.0), name)
            )
    return found


def test_known_constants_come_back_as_predictions() -> None:
    """Constants trade against each other; the seconds they predict do not."""
    found = fit(measured(0.0), "int8")
    assert found.error < 0.01
    again = residual_of(measured(0.0, seed=1), found.efficiency)
    assert np.abs(again).max() < 0.05


def test_outliers_do_not_move_the_fit() -> None:
    found = fit(measured(0.02, outliers=0.15), "int8")
    again = residual_of(measured(0.0), found.efficiency)
    assert np.median(np.abs(again)) < 0.02 and found.high > 1.5  # the range says that such steps happen


def test_the_range_holds_eighty_percent_of_new_steps() -> None:
    found = fit(measured(0.05, repeats=6), "int8")
    new = np.exp(residual_of(measured(0.05, seed=7, repeats=6), found.efficiency))
    assert 0.72 < np.mean((new > found.low) & (new < found.high)) < 0.88
    assert 0.02 < found.error < 0.06 and found.low < 1 < found.high


def test_a_constant_that_no_step_shows_stays_typical() -> None:
    """Where memory is always slow, nothing is known of the ceiling of fast memory."""
    slow = [msgspec.structs.replace(one, bandwidth=BETA / 10, seconds=TRUE.seconds(one.work, PEAK, BETA / 10))
            for one in measured(0.0)]  # fmt: skip
    assert fit(slow, "int8").efficiency.ceiling == pytest.approx(TYPICAL["ceiling"][0], rel=0.3)


def test_two_regimes_have_a_fit_each() -> None:
    """Where memory is fast, everything else takes 1.4 times as long, as when cores lie far apart."""
    mixed = [
        msgspec.structs.replace(one, seconds=one.seconds * (1.4 if one.bandwidth == BETA else 1.0))
        for one in measured(0.01, repeats=6)
    ]
    fits = fit_regimes(mixed, "int8")
    assert len(fits) == 2
    for one in mixed:
        assert abs(residual_of([one], nearest(fits, one.bandwidth).efficiency)[0]) < 0.12
    assert len(fit_regimes([one for one in mixed if one.bandwidth == BETA], "int8")) == 1


def test_too_few_steps_are_refused() -> None:
    with pytest.raises(BadInput, match="steps: 3 steps of 1 sizes"):
        fit(measured(0.0)[:3], "int8")


def test_a_class_takes_its_larger_side_and_what_is_not_hidden_of_the_smaller() -> None:
    sides = [(3.0, 2.0), (1.0, 4.0)]
    assert Efficiency(overlap=1.0).roof(sides) == pytest.approx(7.0)
    assert Efficiency(overlap=0.5).roof(sides) == pytest.approx((5 + 7**0.5) / 2 + (5 + 13**0.5) / 2)
    assert Efficiency(overlap=0.0).roof(sides) == 10.0


def test_a_ceiling_is_felt_where_memory_is_faster() -> None:
    assert limited(1.0, 100.0) == pytest.approx(1.0)
    assert limited(100.0, 1.0) == pytest.approx(1.0)
    assert limited(1.0, 1.0) == pytest.approx(0.5**0.25)


def test_a_profile_keeps_its_fits(tmp_path) -> None:
    profile = Profile("box", "2026-01-01", 2, 8e9, {"2": BETA}, {"int8": PEAK})
    profile = msgspec.structs.replace(profile, fits={"native": {"q4_0": [fit(measured(0.0), "int8")]}})
    save_profile(profile, tmp_path / "p.json")
    assert load_profile(tmp_path / "p.json") == profile


@pytest.mark.parametrize("version", [None, 1, 99])
def test_a_profile_of_another_version_is_refused_by_one_sentence(tmp_path, version) -> None:
    old = {"name": "box", "created": "2026-01-01", "threads": 2, "memory": 8e9, "read_bandwidth": {"2": 1e10},
           "rates": {"fp32": 1e11}} | ({} if version is None else {"version": version})  # fmt: skip
    (tmp_path / "p.json").write_bytes(msgspec.json.encode(old))
    with pytest.raises(BadInput, match="another version of Headway; run `headway probe` again"):
        load_profile(tmp_path / "p.json")


@pytest.mark.parametrize("content", [b"", b"[]", b"{}", b'{"name": 3}', b"\xff"])
def test_a_file_that_is_no_profile_is_refused(tmp_path, content) -> None:
    (tmp_path / "p.json").write_bytes(content)
    with pytest.raises(BadInput, match="not a profile written by `headway probe`"):
        load_profile(tmp_path / "p.json")


def test_what_some_steps_take_longer_is_in_the_mean_and_not_in_the_constants() -> None:
    found = fit(measured(0.02, outliers=0.08, repeats=12), "int8")
    usual = residual_of(measured(0.0, seed=1), found.efficiency)
    assert np.abs(np.median(usual)) < 0.03
    assert found.mean == pytest.approx(1 + 0.08 * 2, abs=0.06)
    assert fit(measured(0.02), "int8").mean == pytest.approx(1, abs=0.02)


@pytest.mark.parametrize(
    "efficiency", [TRUE, msgspec.structs.replace(TRUE, head_stream=0.5, head_linear=0.3, permute=2.0)]
)
def test_slower_steps_take_so_many_times_as_long(efficiency: Efficiency) -> None:
    for work in works(SMALL).values():
        slow, usual = (one.seconds(work, PEAK, BETA) for one in (efficiency.slower(1.3), efficiency))
        assert slow == pytest.approx(1.3 * usual, rel=1e-9)
