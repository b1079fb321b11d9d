"""What measured runs say beyond the physics: followed where they are, nothing far from them, and as sure as that."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from headway.roofline.deployment import Deployment, Pool
from headway.roofline.hardware import find_hardware
from headway.roofline.residual import (
    LABELS,
    NUMBERS,
    Correction,
    Points,
    Process,
    alike,
    corrections,
    reaches,
    save,
    spread_out,
    squares,
)
from headway.roofline.served import CROSSED, Corrected
from headway.shape.catalogue import find_model

SPREAD, NOISE = 0.3, 0.02


def deployment(load: float = 16.0, engine: str = "vllm", **fields: object) -> Deployment:
    shape, device = find_model("llama-3.1-70b"), find_hardware("h100-sxm")
    return Deployment(shape, device, engine, load, 1024.0, 512.0, gpus=4, precision="fp8", **fields)  # type: ignore[arg-type]


def correction(deployments: list[Deployment], logs: list[float]) -> Correction:
    """The process that these measured runs give."""
    points, reach = Points.of(deployments), dict.fromkeys((*NUMBERS, *LABELS), 1.0)
    places = spread_out(points, points.numbers, points.names) * reaches(points, reach)
    gram = SPREAD**2 * alike(squares(places, places)) + NOISE**2 * np.eye(len(places))
    weights = np.linalg.solve(gram, logs).tolist()
    return Correction(points, {"tpot": Process(reach, SPREAD, NOISE, weights, [1.0] * len(logs))})


RUNS = [deployment(load) for load in (1.0, 8.0, 64.0)]
LOGS = [0.1, 0.2, -0.1]


def test_measured_runs_are_followed_and_between_them_it_is_smooth():
    found = correction(RUNS, LOGS)
    assert found.log("tpot", found.places(RUNS)) == pytest.approx(LOGS, abs=0.01)
    between = found.log("tpot", found.places([deployment(load) for load in np.geomspace(1, 64, 50)]))
    assert np.abs(np.diff(between)).max() < 0.02


def test_far_from_all_runs_nothing_is_said_and_the_deviation_is_the_whole_spread():
    found = correction(RUNS, LOGS)
    far = msgspec.structs.replace(deployment(1024.0, "sglang"), prompt=1e5, output=1e5, gpus=64)
    places = found.places([RUNS[1], deployment(20.0), far])
    deviation = found.deviation("tpot", places)
    assert found.log("tpot", places)[2] == pytest.approx(0, abs=0.01)
    assert deviation[2] == pytest.approx((SPREAD**2 + NOISE**2) ** 0.5, rel=0.01)
    assert NOISE <= deviation[0] < deviation[1] < deviation[2]


def test_a_name_that_no_run_had_is_as_far_as_any_other():
    found = correction([deployment(), deployment(engine="sglang")], [0.2, 0.1])
    known, unknown = found.places([deployment(), deployment(engine="another")])
    reach = reaches(found.points, found.fits["tpot"].reach)
    names = squares((known * reach)[None], (unknown * reach)[None])
    assert names[0, 0] == pytest.approx(2.0)  # the engine, and its release


def test_pools_that_are_not_said_are_a_name_and_no_number():
    unsaid, none = (deployment(prefill=pool) for pool in (Pool(4, workers=float("inf")), None))
    numbers = [[number(one) for number in NUMBERS.values()] for one in (unsaid, none)]
    assert numbers[0] == numbers[1] and LABELS["pools"](unsaid) != LABELS["pools"](none)


def test_corrections_survive_their_file(tmp_path):
    found = correction(RUNS, LOGS)
    save({"dense": found}, tmp_path / "a.json.gz")
    again = corrections(tmp_path / "a.json.gz")["dense"]
    assert (again.points, again.fits) == (found.points, found.fits)


def test_the_committed_corrections_are_of_both_kinds_and_light():
    found = corrections()
    assert set(found) == {"dense", "moe"}
    for one in found.values():
        assert set(one.fits) == {"tpot", "ttft"}
        assert all(len(fit.weights) == len(fit.votes) == len(one.points.numbers) < 2500 for fit in one.fits.values())
        assert "headway" not in one.points.known["engine"]


def test_corrections_go_by_kind_of_model_and_load():
    mixture = msgspec.structs.replace(deployment(), shape=find_model("gpt-oss-120b"), precision="fp4")
    found = Corrected([deployment(8.0), mixture], {"dense": correction(RUNS, LOGS)})
    assert found.log("tpot").tolist() == pytest.approx([0.2, 0.0], abs=0.01)
    loads = np.array([1.0, 64.0])
    assert found.log("tpot", np.array([0, 0]), loads).tolist() == pytest.approx([0.1, -0.1], abs=0.01)


def test_what_no_run_is_like_is_left_to_the_physics():
    other = msgspec.structs.replace(deployment(8.0, "sglang"), precision="bf16")
    crossed = msgspec.structs.replace(deployment(8.0), precision="bf16")  # both names were measured, but not together
    dense = correction([*RUNS, other], [*LOGS, 0.3])
    found = Corrected([deployment(8.0), crossed, deployment(8.0, "trtllm")], {"dense": dense})
    assert found.known["tpot"].tolist() == [True, True, False]
    assert found.known["ttft"].tolist() == [True, False, False]
    assert found.log("tpot")[2] == 0 != found.log("tpot")[1]


@pytest.mark.parametrize(("said", "believed"), [(1.3, CROSSED), (-1.3, -CROSSED)])
def test_a_group_without_runs_is_not_corrected_by_more_than_ever_held_of_one(said: float, believed: float):
    other = msgspec.structs.replace(deployment(8.0, "sglang"), precision="bf16")
    crossed = msgspec.structs.replace(deployment(8.0), precision="bf16")
    disturbed = correction([*RUNS, other], [said] * (len(RUNS) + 1))
    found = Corrected([deployment(8.0), crossed], {"dense": disturbed}).log("tpot")
    assert found[0] == pytest.approx(said, rel=0.2)
    assert found[1] == believed


def test_what_is_said_of_qwen_on_gb200_is_not_held_to_be_the_devices():
    """The one series of a dense model there contradicts itself: 8 and 42 ms per token at one request per replica."""
    llama = Deployment(find_model("llama-3.1-70b"), find_hardware("gb200"), "trtllm", 8.0, 2000.0, 500.0, gpus=2)
    known = msgspec.structs.replace(llama, shape=find_model("qwen3-32b"))
    found = Corrected([llama, known], corrections()).log("tpot")
    assert abs(found[0]) <= CROSSED < found[1]
