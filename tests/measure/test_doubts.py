"""What is measured on a busy machine, or contradicts itself, is not to be saved."""

from __future__ import annotations

from pathlib import Path

import pytest

from headway.cli import main
from headway.core.events import Header
from headway.engine import profile as profiles
from headway.measure import checkup, served
from headway.measure.doubts import Waiting, doubts
from headway.measure.served import CalibratedProfile, Held
from headway.roofline.profile import Fit, Profile, Rates, load_profile
from headway.roofline.step import Efficiency


def profile(error: float = 0.05, **shares: float) -> Profile:
    fit = Fit(Efficiency(**shares), "int8", 1e11, 0.9, 1.1, error, (1e10, 1e10, 1e10), 100)
    return Profile("m", "2026-01-01", 2, 1e10, {"2": 1e10}, {"int8": 1e11}, {"native": {"q4_0": [fit]}})


STEADY = (Rates(1e10, 1e11), Rates(2e10, 1.1e11))  # memory has regimes, which fits tell apart


@pytest.mark.parametrize(
    ("measured", "waited", "probes", "sentence"),
    [
        (profile(), 0.43, STEADY, "for 43% of the time there was no core"),
        (profile(), 0.0, (Rates(1e10, 1e11), Rates(1e10, 5e10)), "disagree: 50 and 100 GFLOP/s"),
        (profile(error=0.5), 0.0, STEADY, "steps in q4_0 are missed by 50%"),
        (profile(linear=2.04), 0.0, STEADY, "reach 204% of the rate of int8"),
        (profile(stream=1.5), 0.0, STEADY, "reach 150% of the memory bandwidth"),
    ],
)
def test_a_reason_for_doubt_is_named(
    measured: Profile, waited: float, probes: tuple[Rates, Rates], sentence: str
) -> None:
    (found,) = doubts(measured, ["q4_0"], "native", waited, probes)
    assert sentence in found
    assert doubts(profile(linear=1.1), ["q4_0"], "native", 0.05, STEADY) == []


def test_what_was_fitted_before_is_not_judged_again() -> None:
    assert doubts(profile(error=0.5), ["bf16"], "native", 0.0, STEADY) == []


def test_waiting_is_read_where_the_system_tells(tmp_path: Path) -> None:
    stat = tmp_path / "schedstat"
    stat.write_text("1 1000 5\n")
    waiting = Waiting(stat)
    stat.write_text("1 3000001000 5\n")
    assert waiting.share() > 1
    assert Waiting(tmp_path / "none").share() == 0


def test_a_fit_that_misses_the_steps_left_out_of_it_is_not_saved_unless_forced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    log, out = tmp_path / "run.jsonl", tmp_path / "profile.json"
    log.touch()
    held = [Held("decode", 100, 0.04, 0.1, 0.0), Held("prompt", 40, 0.64, 1.2, 0.6), Held("mixed", 2, 0.9, 0.9, 0.9)]
    found = CalibratedProfile(profile(), "native", ("q4_0",), profile().fits["native"]["q4_0"], held)
    monkeypatch.setattr(served, "calibrate", lambda *given: found)
    monkeypatch.setattr("headway.engine.event_file.read_header", lambda path: Header(limits=None, policy="", ttl=0))
    monkeypatch.setattr("headway.engine.profile.saved_profile", profile)
    run = ["calibrate", str(log), "--model", "qwen2.5-0.5b", "--output", str(out)]
    for force in (False, True):
        with pytest.raises(SystemExit) as end:
            main(run + ["--force"] * force)
        assert bool(end.value.code) is not force and out.exists() is force
        shown = capsys.readouterr()
        assert "64.0%" in shown.out, "what was found is shown all the same"
        said = "nothing was saved: prompt steps that were left out of the fit are missed by 64% in the median"
        assert (said in shown.err) is not force


def test_a_checkup_keeps_what_is_new_and_believed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "profile.json"
    monkeypatch.setattr(profiles, "profile_path", lambda: path)
    assert checkup._keep(profile(error=0.5), "native", 0.0, STEADY).startswith("nothing: steps in q4_0 are missed")
    assert not path.exists()
    assert checkup._keep(profile(), "native", 0.0, STEADY).startswith(f"{path}: ")
    assert load_profile(path) == profile()
    path.write_bytes(before := path.read_bytes())
    assert checkup._keep(profile(), "native", 0.5, STEADY) == "" and path.read_bytes() == before
    assert checkup._keep(profile(error=0.1), "native", 0.5, STEADY).startswith("nothing: other programs are running")
    assert path.read_bytes() == before
