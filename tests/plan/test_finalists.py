"""Finalists of `headway plan search`: played by the simulator, they keep, lose or get a place by what is seen."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence

import msgspec
import pytest

from headway.cli import main
from headway.plan.answers_lists import Search
from headway.plan.candidates import Candidate
from headway.plan.finalists import EACH, NEAR, OFTENEST, Entry, Play, Plays, Request, Staged, judged, staging
from headway.plan.render import document
from headway.plan.search import Wanted, search
from headway.plan.traffic import Target, Traffic
from headway.report.document import Grid
from headway.roofline.hardware import find_hardware
from headway.shape.catalogue import find_model

H100, H200 = find_hardware("h100"), find_hardware("h200")
TRAFFIC = Traffic(rate=60, input_tokens=2000, output_tokens=500)
TARGET = Target(ttft=0.3, tpot=0.02)
MIXED = Wanted((H100, H200), split=False)
GOOD: Request = (0.1, 0.01)
LATE: Request = (9.0, 0.01)


class Actor:
    """Plays nothing: answers as told, and remembers what it was asked."""

    def __init__(self, says: Callable[[Candidate, Staged], Sequence[Request]]) -> None:
        self.says = says
        self.asked: list[tuple[Candidate, Staged]] = []

    def __call__(self, candidate: Candidate, staged: Staged) -> Sequence[Request]:
        self.asked.append((candidate, staged))
        return self.says(candidate, staged)


def found(play: Play | None, most: int = 4, wanted: Wanted = MIXED, target: Target = TARGET) -> Search:
    stage = Plays(most, play) if play else None
    return search("llama-3.1-8b", find_model("llama-3.1-8b"), TRAFFIC, target, wanted, stage)


def always(*requests: Request) -> Actor:
    return Actor(lambda candidate, staged: list(requests) * 100)


def names(answer: Search) -> list[str]:
    return [row.name for row in answer.deployments]


def test_without_a_stage_the_ranking_is_what_is_predicted() -> None:
    answer = found(None)
    assert answer.finalists == () and len(answer.deployments) > 4


def test_those_that_hold_keep_their_place_and_those_just_beyond_get_one() -> None:
    predicted, actor = found(None), always(GOOD)
    answer = found(actor)
    near = [one for one in answer.finalists if one.near]
    strict = [one for one in answer.finalists if not one.near]
    assert len(actor.asked) == len(answer.finalists) == 4 and near
    assert len(near) <= 2
    first = predicted.deployments[0]
    for one in near:
        assert one.deployment.usd_per_hour < first.usd_per_hour
        assert 0.3 < one.deployment.ttft_ms / 1e3 <= 0.3 * NEAR or 0.02 < one.deployment.tpot_ms / 1e3 <= 0.02 * NEAR
    assert [one.deployment.name for one in strict] == names(predicted)[: len(strict)]
    assert {one.verdict for one in answer.finalists} == {"meets"}
    assert names(answer)[: len(near)] == [one.deployment.name for one in near]
    assert names(answer)[len(near) :] == names(predicted)[: 10 - len(near)]
    for row in answer.deployments[: len(near)]:
        assert (row.utilisation, row.headroom, row.survives_one_loss) == (1.0, 0.0, False)
    assert all(row.flags for row in answer.deployments)


def test_those_that_miss_lose_their_place_and_the_reason_is_said() -> None:
    predicted = found(None)
    worst = predicted.deployments[0]

    def says(candidate: Candidate, staged: Staged) -> list[Request]:
        replicas = round(worst.rate / staged.rate)
        return [LATE if (candidate.name in worst.name and replicas == worst.replicas) else GOOD] * 300

    answer = found(Actor(says))
    assert worst.name not in names(answer)
    assert set(names(predicted)[1:4]) <= set(names(answer))
    (reason,) = [one.reason for one in answer.rejected if one.name == worst.name]
    assert reason == "in the simulation 0.0% of 300 requests are within the targets, 99 % promised"
    text = json.dumps(msgspec.to_builtins(document(answer).parts[0:8], enc_hook=str))
    assert "loses its place" in text


def test_while_none_holds_more_are_played_but_not_without_end() -> None:
    actor = always(LATE)
    answer = found(actor, most=2)
    assert 2 < len(actor.asked) <= 2 * OFTENEST
    played = {one.deployment.name for one in answer.finalists}
    assert not played & set(names(answer))
    rejected = {one.name for one in answer.rejected}
    assert {one.deployment.name for one in answer.finalists if not one.near} <= rejected
    assert not {one.deployment.name for one in answer.finalists if one.near} & rejected  # never had one


def test_plays_of_many_requests_are_fewer() -> None:
    actor = always(GOOD)
    slow = msgspec.structs.replace(TRAFFIC, rate=30, output_tokens=4000)
    wanted, plays = Wanted((H100, H200), split=False, degrees=(4, 8)), Plays(3, actor)
    search("llama-3.1-8b", find_model("llama-3.1-8b"), slow, TARGET, wanted, plays)
    sizes = [staged.requests for _, staged in actor.asked]
    assert sizes and sum(sizes[:-1]) < EACH * 3


def test_what_the_simulator_cannot_play_keeps_its_place_and_says_so() -> None:
    wanted = Wanted((H100,), degrees=(1, 2))
    answer = found(always(GOOD), wanted=wanted)
    silent = [one for one in answer.finalists if one.verdict == "not played"]
    assert silent and all(one.deployment.prefill is not None and one.ttft is None for one in silent)
    assert {one.deployment.name for one in silent} <= set(names(answer))
    grid = next(part for part in document(answer).parts if isinstance(part, Grid) and part.head[0] == "simulated")
    assert len(grid.rows) == len(answer.finalists)
    assert sum(row[-1] == "not played" for row in grid.rows) == len(silent)


@pytest.mark.parametrize(
    ("good", "late", "verdict"),
    [(300, 0, "meets"), (297, 3, "meets"), (296, 4, "close"), (280, 20, "misses"), (0, 300, "misses")],
)
def test_a_target_is_missed_only_where_the_share_leaves_no_doubt(good: int, late: int, verdict: str) -> None:
    row, actor = found(None).deployments[0], always(GOOD)
    found(actor)
    candidate, staged = actor.asked[0]
    one = judged(Entry(row, candidate), [GOOD] * good + [LATE] * late, staged, TARGET)
    assert one.verdict == verdict and one.attainment == good / 300
    assert one.placed == (verdict != "misses")
    near = judged(Entry(row, candidate, near=True), [GOOD] * good + [LATE] * late, staged, TARGET)
    assert near.placed == (verdict == "meets")


def test_percentiles_are_of_the_requests_seen_and_answers_of_one_token_have_no_pace() -> None:
    row, actor = found(None).deployments[0], always(GOOD)
    found(actor)
    candidate, staged = actor.asked[0]
    requests: list[Request] = [(k / 1e3, k / 1e5 if k > 50 else None) for k in range(1, 101)]
    one = judged(Entry(row, candidate), requests, staged, Target(ttft=0.08, tpot=0.02))
    assert (one.requests, one.played) == (100, staged.requests)
    assert one.ttft is not None and one.tpot is not None
    assert (one.ttft.p50, one.ttft.p95, one.ttft.p99) == pytest.approx((50, 95, 99))
    assert one.tpot.p50 == pytest.approx(0.75)
    assert one.attainment == 0.8


def test_a_replica_is_played_as_its_command_line_sets_it_up() -> None:
    actor = always(GOOD)
    answer = found(actor)
    rows = {row.name: row for row in answer.deployments}
    for one in answer.finalists:
        row = rows[one.deployment.name]
        (staged,) = [s for c, s in actor.asked if f"({c.name})" in row.name and s.rate == row.rate / row.replicas]
        words = row.flags["vllm"].split()
        flags = {word: words[index + 1] for index, word in enumerate(words[:-1])}
        assert int(flags["--max-num-seqs"]) == staged.rows
        assert int(flags["--max-num-batched-tokens"]) == staged.step_tokens
        assert int(flags["--max-model-len"]) == staged.longest
        assert staged.before > 0 and 0.5 < staged.slower < 2


def test_a_batch_that_too_few_requests_would_fill_is_not_played() -> None:
    actor = always(GOOD)
    found(actor)
    candidate, _ = actor.asked[0]
    row = found(None).deployments[0]
    long = msgspec.structs.replace(row, mean_tpot_ms=1e5)
    assert staging(Entry(row, candidate), TRAFFIC) is not None
    assert staging(Entry(long, candidate), TRAFFIC) is None


ASKED = ["plan", "search", "--model", "llama-3.1-8b", "--hardware", "h100-sxm", "--no-split", "--rate", "2",
         "--input-tokens", "500", "--output-tokens", "100", "--slo", "ttft=1s,tpot=50ms"]  # fmt: skip


def run(arguments: list[str], capsys: pytest.CaptureFixture[str], code: int = 0) -> str:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == code
    shown = capsys.readouterr()
    return shown.out if code == 0 else shown.err


def test_the_command_has_the_simulator_play_them(capsys: pytest.CaptureFixture[str]) -> None:
    answer = msgspec.json.decode(run([*ASKED, "--finalists", "1", "--json"], capsys), type=Search)
    (one,) = answer.finalists
    assert one.verdict == "meets" and one.attainment == 1.0 and one.requests >= 250
    assert one.ttft is not None and one.tpot is not None
    assert 0 < one.ttft.p50 <= one.ttft.p99 < 1000 and 0 < one.tpot.p50 <= one.tpot.p99 < 50
    assert one.tpot.p50 == pytest.approx(one.deployment.mean_tpot_ms, rel=0.35)  # two models of one machine
    assert "p50/p95/p99" in run([*ASKED, "--finalists", "1"], capsys)
    none = msgspec.json.decode(run([*ASKED, "--finalists", "0", "--json"], capsys), type=Search)
    assert none.finalists == () and [row.name for row in none.deployments]
    assert "--finalists: -1; accepted: a whole number from 0" in run([*ASKED, "--finalists=-1"], capsys, 2)
