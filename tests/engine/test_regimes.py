"""A machine that changes its speed: the engine's steps say so, predictions follow, and a replay follows them."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from headway.core.clock import VirtualClock
from headway.core.errors import BadInput
from headway.core.events import EventLog, Regime, StepDone
from headway.core.request import Request, SamplingParams
from headway.core.step import Capabilities, Seconds, StepShape
from headway.engine.event_file import EventWriter, read_events
from headway.engine.regimes import LASTING, RegimeWatch, nearest
from headway.roofline.fixed import FixedCosts
from headway.roofline.timing import Timing
from headway.scheduling.budget import Budget
from headway.scheduling.scheduler import Scheduler
from headway.serve.metrics import Metrics, render
from headway.simulate.replay import replay
from tests.simulated import HashedTokens, SimulatedExecutor

FAST, SLOW = FixedCosts(step=0.005, token=1e-4, pair=1e-7), FixedCosts(step=0.009, token=3e-4, pair=2e-7)
LIMITS = Capabilities(
    block_size=32, blocks=(400,), windows=(None,), max_rows=8, max_tokens_per_step=256, max_model_len=2000
)


def timings(*models: Any) -> list[Timing]:
    return [Timing(model, "estimate", 0.9, 1.1, "") for model in models]


class Machine:
    """Takes as long as `now` says, whatever anybody predicts."""

    def __init__(self) -> None:
        self.now = FAST

    def predict(self, shape: Any) -> float:
        return self.now.predict(shape)


def recorded(path: Path, phases: list[FixedCosts], regimes: list[FixedCosts]) -> list[Regime]:
    """Serve a load on a machine that goes through phases, with an event log -> what was said of regimes."""
    clock, machine, watch = VirtualClock(), Machine(), RegimeWatch(timings(*regimes))
    log, said = EventLog(watch), []
    log.subscribe(lambda event: said.append(event) if isinstance(event, Regime) else None)
    scheduler = Scheduler(
        LIMITS, key=b"k", budget=Budget(tokens=256, milliseconds=30.0), model=regimes[0], regimes=regimes, log=log
    )
    executor = SimulatedExecutor(LIMITS, clock, machine, HashedTokens(0, 50))
    with EventWriter(path, scheduler.header()) as writer:
        log.subscribe(writer)
        number = 0
        for machine.now in phases:
            for turn in range(4 * LASTING):
                if turn % 8 == 0:
                    number += 1
                    tokens = [number] * (50 + number * 37 % 400)
                    scheduler.add(Request(f"r{number}", tokens, SamplingParams(seed=0), max_len=len(tokens) + 20))
                if (news := watch.news(clock.now())) is not None:
                    scheduler.enter_regime(news)
                plan = scheduler.plan(clock.now())
                if not plan.empty:
                    scheduler.commit(executor.collect(executor.submit(plan)), clock.now())
    return said


def test_the_regime_follows_the_machine_and_a_replay_plans_the_same_steps(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    said = recorded(path, [FAST, SLOW, FAST], [FAST, SLOW])
    assert [(news.regime, news.inside) for news in said][-2:] == [(1, True), (0, True)]
    assert [event for event in read_events(path) if isinstance(event, Regime)] == said
    found = replay(path, FAST, regimes=[FAST, SLOW])
    assert found.difference is None and found.steps > 5 * LASTING
    with pytest.raises(BadInput, match="came to regime 1"):
        replay(path, FAST)
    assert replay(path, FAST, regimes=[FAST, FAST]).difference is not None, "the models matter"


def test_a_machine_outside_of_its_profile_is_told_once_and_so_is_its_return(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        said = recorded(tmp_path / "run.jsonl", [FAST, SLOW, FAST], [FAST])
    assert [news.inside for news in said] == [False, True]
    assert 1.1 < said[0].ratio < 3
    (line,) = [record.getMessage() for record in caplog.records]
    assert "times what the profile" in line and "headway probe" in line


def test_a_log_that_begins_later_begins_with_the_regime_and_the_slowness_of_that_moment() -> None:
    one = Scheduler(LIMITS, key=b"k", model=FAST, regimes=[FAST, SLOW])
    one.enter_regime(Regime(now=0, regime=1, ratio=1.0, inside=True))
    one.pace.predict_anew({3: [1.5] * 30})
    one._steps = 7
    header = one.header()
    other = Scheduler(LIMITS, key=b"k", model=FAST, regimes=[FAST, SLOW])
    other.begin_at(header)
    assert (header.regime, other.pace.slowness(3), other.pace.ratios) == (1, 1.5, one.pace.ratios)


def test_the_first_regime_is_the_one_that_the_first_steps_look_like() -> None:
    step: Any = StepShape(tokens=1, rows=1, logit_rows=1, kv_tokens=(1,), pairs=(1,))
    assert [nearest(timings(FAST, SLOW), costs, step) for costs in (FAST, SLOW, FixedCosts(step=0.02))] == [0, 1, 1]


def test_metrics_and_top_say_that_the_machine_has_changed() -> None:
    from headway.client.watch import parse, view
    from headway.engine.ipc import Status

    metrics = Metrics("m")
    shape = StepShape(1, 1, 1, (1,), (1,))
    metrics.fold(
        StepDone(
            now=1, step=0, planned=0, idle=0, rows=(), counts=(), emitted=(), shape=shape, predicted=1.0,
            seconds=Seconds(forward=1.6),
        )
    )  # fmt: skip
    metrics.fold(Regime(now=0, regime=1, ratio=1.6, inside=False))
    status = Status(blocks=1, used=0, cached=0, block_size=32)
    text = render(metrics.series(status))
    assert 'headway:step_times_outside_profile{model_name="m"} 1' in text
    scrape = parse(text, 0.0)
    seen = view(scrape, scrape)
    assert seen.outside and seen.step_ratio == pytest.approx(1.6)
