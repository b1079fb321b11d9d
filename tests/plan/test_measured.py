"""What `plan` says of a machine whose steps were timed: estimates with the range of those very steps."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from headway.cli import main
from headway.engine import profile as where
from headway.engine.references import load_shape
from headway.measure.probe import save_profile
from headway.plan.measured import ClosedLoop
from headway.roofline.profile import Fit, Profile, device_of
from headway.roofline.step import Efficiency, decode_step
from headway.roofline.timing import estimate
from headway.simulate.arrivals import Closed, Lengths, rows_of
from headway.simulate.deploy import EngineSetup, deployed
from headway.simulate.play import play
from headway.traffic.load import Load

MODEL = "smollm2-135m"
CONSTANTS = Efficiency(stream=0.9, linear=0.5, attention=0.2, prefill_attention=0.3, overlap=0.8, step=3e-4, layer=2e-5)
FIT = Fit(CONSTANTS, "fp32", 1e11, 0.9, 1.25, 0.04, (2e10, 3e10, 4e10), 70)
PROFILE = Profile("box", "2026-01-01", 2, 8e9, {"2": 4e10}, {"fp32": 1e11, "bf16": 2e11}, {"native": {"bf16": [FIT]}})
BARE = Profile("box", "2026-01-01", 2, 8e9, {"2": 4e10}, {"fp32": 1e11, "bf16": 2e11})

Answer = Callable[..., dict[str, Any]]


@pytest.fixture
def answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Answer:
    """What `plan` prints as JSON of a machine with this profile."""
    path = tmp_path / "profile.json"
    monkeypatch.setattr(where, "profile_path", lambda: path)

    def run(*arguments: str, profile: Profile = PROFILE) -> dict[str, Any]:
        save_profile(profile, path)
        capsys.readouterr()
        with pytest.raises(SystemExit) as end:
            main(["plan", *arguments, "--model", MODEL, "--hardware", "this-machine", "--json"])
        assert not end.value.code
        return json.loads(capsys.readouterr().out)

    return run


@pytest.mark.parametrize("verb", ["step", "prefill"])
def test_single_steps_are_the_profiles_with_its_range(verb: str, answer: Answer) -> None:
    found = answer(verb)
    assert (found["kind"], found["mode"]) == ("estimate", "calibrated") and not found["notes"]
    assert found["range"]["p50"] == found["seconds"] == pytest.approx(found["range"]["p10"] / 0.9)
    assert found["range"]["p90"] == pytest.approx(1.25 * found["seconds"])
    exact = answer(verb, "--mode", "exact")
    assert (exact["kind"], exact["range"]) == ("bound" if verb == "step" else "estimate", None)
    assert any("steps of Headway on this machine" in line for line in found["assumptions"])


def test_a_step_is_what_the_scheduler_is_told(answer: Answer) -> None:
    shape = load_shape(MODEL)
    timing = estimate(shape, PROFILE, "native", ("bf16", "bf16"))
    assert timing is not None
    seconds = answer("step", "--batch", "4", "--context", "300")["seconds"]
    assert seconds == pytest.approx(timing.model.predict(decode_step(shape, 4, 300)))


def test_a_machine_whose_steps_were_not_timed_has_bounds_and_says_why(answer: Answer) -> None:
    found = answer("step", profile=BARE)
    assert found["kind"] == "bound" and "no steps of the native backend on bf16" in found["notes"][0]
    served = answer("estimate", profile=BARE)
    assert served["kind"] == "bound" and "headway probe" in served["abstained"] and served["tpot"] is None


def test_served_requests_have_a_range_and_terms_that_add_up(answer: Answer) -> None:
    found = answer("estimate", "--concurrency", "6", "--input-tokens", "400", "--output-tokens", "100")
    assert (found["kind"], found["engine"], found["abstained"]) == ("estimate", "headway", "")
    assert found["tpot"]["p10"] < found["tpot"]["p50"] < found["tpot"]["p90"] and found["ttft"]["p50"] > 0
    assert sum(found["terms"].values()) == pytest.approx(found["tpot"]["p50"], rel=0.01)
    assert found["bound_tpot"] < found["tpot"]["p50"] and found["bound_ttft"] < found["ttft"]["p50"]


def test_the_search_takes_the_machines_own_steps(answer: Answer) -> None:
    load = ["--rate", "0.02", "--input-tokens", "300", "--output-tokens", "60", "--prices", "this-machine=0.1"]
    found = answer("search", *load)
    (row,), (one,) = found["deployments"], found["finalists"]
    assert row["basis"] == "measured" and row["replicas"] == 1 and row["chunk"] < 512
    served = answer("estimate", "--concurrency", "1", "--input-tokens", "300", "--output-tokens", "60")
    assert row["mean_tpot_ms"] == pytest.approx(1e3 * served["tpot"]["p50"], rel=0.3)
    assert one["verdict"] == "meets" and one["tpot"]["p50"] == pytest.approx(row["mean_tpot_ms"], rel=0.3)


@pytest.mark.parametrize(("flying", "prompt", "output"), [(1, 300, 100), (3, 300, 100), (8, 300, 100), (3, 1500, 40)])
def test_the_closed_loop_is_near_the_scheduler_itself(flying: int, prompt: int, output: int) -> None:
    here = deployed(load_shape(MODEL), device_of(PROFILE), 1, EngineSetup(prefix_cache=False), profile=PROFILE)
    rows = rows_of(Lengths(input_tokens=prompt, output_tokens=output, output_cv=0.5), 12 + 4 * flying, seed=1)
    played = play(here, Closed(rows, flying), Load("closed")).summary
    said = ClosedLoop(here.model, prompt, output, here.limits.max_rows, slowness=FIT.high).at(flying)
    assert 1e3 * said.tpot == pytest.approx(played["tpot_ms"]["mean"], rel=0.2)
    assert 1e3 * said.ttft == pytest.approx(played["ttft_ms"]["mean"], rel=0.35)
