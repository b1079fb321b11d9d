"""Constants fitted to the steps of an event log are those that the steps were made with."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from headway.core.clock import VirtualClock
from headway.core.errors import BadInput
from headway.core.events import EventLog, StepDone
from headway.core.request import Request, SamplingParams
from headway.core.step import Capabilities
from headway.engine.event_file import EventWriter, read_events
from headway.measure.served import Window, calibrate
from headway.roofline.noise import BLOCK, CHUNK, DECODE, KEPT, StepNoise
from headway.roofline.profile import Fit, Profile, Rates, device_of
from headway.roofline.step import Efficiency, StepTime
from headway.scheduling.scheduler import Scheduler
from headway.shape.catalogue import find_model
from headway.simulate.arrivals import Closed
from headway.simulate.deploy import EngineSetup, deployed
from headway.simulate.play import play
from headway.traffic.load import Load
from headway.traffic.traces import TraceRow
from tests.simulated import HashedTokens, SimulatedExecutor

SHAPE = find_model("qwen2.5-0.5b")
PROFILE = Profile("box", "2026-01-01", 2, 8e9, {"2": 2e10}, {"bf16": 4e11})
MADE = Efficiency(stream=0.8, linear=0.5, stream_cache=0.6, attention=0.1, prefill_attention=0.1, step=2e-4, layer=2e-5)


def served(path: Path, requests: int, noise: StepNoise | None = None) -> None:
    limits = Capabilities(
        block_size=32, blocks=(2000,), windows=(None,), max_rows=16, max_tokens_per_step=256, max_model_len=2048
    )
    log, clock = EventLog(), VirtualClock()
    model = StepTime(SHAPE, device_of(PROFILE), math="bf16", efficiency=MADE)
    scheduler = Scheduler(limits, key=b"k", log=log)
    executor = SimulatedExecutor(limits, clock, model, HashedTokens(1, 1 << 20), noise=noise)
    with EventWriter(path, scheduler.header(config={"backend": "native"})) as writer:
        log.subscribe(writer)
        for number in range(requests):
            prompt = [number] * (20 + 70 * number % 700)
            scheduler.add(Request(str(number), prompt, SamplingParams(seed=0), max_len=len(prompt) + 5 + number % 30))
            for _ in range(number % 7):
                turn(scheduler, executor, clock)
        while not scheduler.idle:
            turn(scheduler, executor, clock)


def turn(scheduler: Scheduler, executor: SimulatedExecutor, clock: VirtualClock) -> None:
    plan = scheduler.plan(clock.now())
    if not plan.empty:
        scheduler.commit(executor.collect(executor.submit(plan)), clock.now())


def test_steps_left_out_are_predicted_and_the_profile_holds_the_fit(tmp_path: Path) -> None:
    log = tmp_path / "run.jsonl"
    served(log, 60)
    found = calibrate(log, SHAPE, PROFILE, "bf16")
    assert {one.kind for one in found.held_out} >= {"decode", "mixed"}
    assert all(one.median < 0.05 and one.p90 < 0.15 for one in found.held_out), found.held_out
    assert found.profile.fits["native"].keys() == {"bf16"}
    assert found.profile.rates == PROFILE.rates


def test_the_profile_knows_how_steps_varied(tmp_path: Path) -> None:
    log, draws = tmp_path / "run.jsonl", np.random.default_rng(1)
    made = {kind: tuple(int(one) for one in 1000 * draws.lognormal(0, 0.05, KEPT)) for kind in (DECODE, CHUNK)}
    made[DECODE] = tuple(3000 if number % 40 == 0 else one for number, one in enumerate(made[DECODE]))
    served(log, 400, StepNoise(made, 5))
    (found,) = calibrate(log, SHAPE, PROFILE, "bf16").fits
    assert found.noise.keys() == made.keys()
    for kind, factors in found.noise.items():
        assert BLOCK < len(factors) <= KEPT
        assert np.quantile(factors, (0.1, 0.5, 0.9)) == pytest.approx(
            np.quantile(made[kind], (0.1, 0.5, 0.9)), rel=0.04
        )
    assert np.mean(np.array(found.noise[DECODE]) > 2500) == pytest.approx(1 / 40, rel=0.3), "rare slow steps stay"


def test_what_was_served_in_two_regimes_has_two_fits_and_the_rest_is_left_out(tmp_path: Path) -> None:
    log = tmp_path / "run.jsonl"
    served(log, 90)
    ends = [event.now for event in read_events(log) if isinstance(event, StepDone)]
    third = len(ends) // 3
    slow = Window(0, ends[third], Rates(2e10, 4e11))
    fast = Window(ends[third], ends[2 * third], Rates(6e10, 4e11))
    found = calibrate(log, SHAPE, PROFILE, "bf16", windows=[slow, fast])
    assert sum(one.steps for one in found.fits) <= 2 * third + 2
    assert sorted(one.bandwidth[1] for one in found.fits) == [2e10, 6e10]
    again = calibrate(log, SHAPE, found.profile, "bf16", windows=[slow])
    kept = {one.bandwidth[1] for one in again.profile.fits["native"]["bf16"]}
    assert kept == {2e10, 6e10}, "a regime that was not seen now keeps its fit"


@pytest.mark.parametrize(("math", "requests", "says"), [("fp8", 60, "no fp8 rate"), ("bf16", 1, "serve more")])
def test_what_cannot_be_fitted_is_refused(tmp_path: Path, math: str, requests: int, says: str) -> None:
    log = tmp_path / "run.jsonl"
    served(log, requests)
    with pytest.raises(BadInput, match=says):
        calibrate(log, SHAPE, PROFILE, math)


def test_the_verb_writes_what_simulate_reads(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from headway.cli import main
    from headway.engine import profile as saved

    log, out = tmp_path / "run.jsonl", tmp_path / "profile.json"
    served(log, 60)
    rates = PROFILE.rates | dict.fromkeys(("int8", "fp32", "f32"), 4e11)
    profile = Profile("box", "2026-01-01", 2, 8e9, PROFILE.read_bandwidth, rates)
    monkeypatch.setattr(saved, "saved_profile", lambda: profile)

    def ran(*args: str) -> Any:
        with pytest.raises(SystemExit) as ended:
            main([*args, "--json"])
        assert not ended.value.code, capsys.readouterr()
        return json.loads(capsys.readouterr().out)

    found = ran("calibrate", str(log), "--model", SHAPE.name, "--output", str(out))
    assert found["held_out"] and out.is_file()
    load = ["--model", SHAPE.name, "--hardware", str(out), "--requests", "4", "--output-tokens", "5"]
    played = ran("simulate", *load)
    assert played["step_time"].startswith("estimated") and played["requests"]["completed"] == 4


def test_simulations_vary_as_the_profile_says_by_their_seed() -> None:
    noise = {DECODE: (1000,) * 99 + (5000,), CHUNK: (1000, 1100)}
    fit = Fit(MADE, "bf16", 4e11, 0.9, 1.2, 0.03, (2e10, 2e10, 2e10), 100, 1.04, noise)
    profile = msgspec.structs.replace(PROFILE, memory=3e10, fits={"native": {"bf16": [fit]}})
    load = Load("closed", concurrency=4)

    def mean(seed: int, **setup: Any) -> float:
        one = deployed(SHAPE, device_of(profile), 1, EngineSetup(**setup), profile=profile)
        one = msgspec.structs.replace(one, seed=seed)
        tpot: float = play(one, Closed([TraceRow(0.0, 50, 200)] * 40, 4), load).summary["tpot_ms"]["mean"]
        return tpot

    assert mean(0) == mean(0) != mean(1)
    assert mean(0, noise=False) == mean(1, noise=False)
    assert np.mean([mean(seed) for seed in range(3)]) == pytest.approx(mean(0, noise=False), rel=0.02)
