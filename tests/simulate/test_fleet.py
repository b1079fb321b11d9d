"""Fleets: the same router and scheduler, with replicas that come, go, fail and are slow."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from headway.cli import main
from headway.core.errors import BadInput
from headway.core.options import Options, declared
from headway.engine.references import load_device, load_shape
from headway.routing.autoscale import Autoscale
from headway.simulate.deploy import EngineSetup, deployed
from headway.simulate.fleet_file import Befalls, FleetFile, FleetOptions, KindOptions, read_fleet
from headway.simulate.play import Played, play
from headway.simulate.play_fleet import kinds_of, play_fleet
from headway.simulate.traffic import Traffic

MODEL = "llama-3.1-8b"
SHORT = Traffic(rate=20.0, requests=400, input_tokens=800, output_tokens=60, seed=3)


def read(folder: Path, text: str) -> FleetFile:
    path = folder / "fleet.toml"
    path.write_text(text)
    return read_fleet(path, EngineSetup())


def played(folder: Path, text: str, traffic: Traffic = SHORT) -> Played:
    file = read(folder, text)
    kinds = kinds_of(file, load_shape(MODEL), lambda name: (load_device(name), None))
    return play_fleet(file, kinds, traffic.source(8192), traffic.load, seed=traffic.seed)


def outcomes(one: Played) -> dict[str, int]:
    counts = one.trail.counts
    assert counts["arrived"] == counts["finished"] + counts["refused"] + counts["aborted"] == len(one.run.records)
    return counts


@pytest.mark.parametrize("router", ["prefix", "least-loaded", "round-robin", "power-of-two"])
def test_a_fleet_to_which_nothing_happens_is_that_many_equal_replicas(tmp_path: Path, router: str) -> None:
    fleet = played(tmp_path, f"router = '{router}'\n[[replicas]]\nhardware = 'h100-sxm'\ncount = 3")
    device = deployed(load_shape(MODEL), load_device("h100-sxm"), 1, EngineSetup())
    equal = play(device, SHORT.source(8192), SHORT.load, replicas=3, router=router)
    assert fleet.run.records == equal.run.records
    assert fleet.summary["steps"]["count"] == equal.summary["steps"]["count"]
    assert fleet.summary["steps"]["busy_share"] == pytest.approx(equal.summary["steps"]["busy_share"], rel=0.01)
    assert fleet.summary["cost"]["dollars"] == pytest.approx(equal.summary["cost"]["dollars"], rel=0.01)


def test_what_has_no_token_yet_is_tried_elsewhere_and_what_has_is_lost(tmp_path: Path) -> None:
    text = """
        router = "least-loaded"
        repair_seconds = 5
        [[replicas]]
        hardware = "h100-sxm"
        count = 2
        [[events]]
        at = 5.0
        replica = 1
    """
    one = played(tmp_path, text)
    fleet, counts = one.summary["fleet"], outcomes(one)
    assert (fleet["failures"], fleet["started"]) == (1, 3)
    assert fleet["lost"] == counts["aborted"] > 0
    assert counts["refused"] == 0
    assert played(tmp_path, text).run.records == one.run.records


def test_while_none_is_up_requests_wait_for_the_one_that_is_repaired(tmp_path: Path) -> None:
    text = """
        repair_seconds = 3
        [[replicas]]
        hardware = "h100-sxm"
        [[events]]
        at = 4.0
    """
    one = played(tmp_path, text)
    counts = outcomes(one)
    assert counts["refused"] == 0
    assert counts["finished"] == 400 - one.summary["fleet"]["lost"]
    assert one.summary["ttft_ms"]["max"] > 2000


def test_where_the_last_one_is_drained_the_rest_is_refused(tmp_path: Path) -> None:
    text = "[[replicas]]\nhardware = 'h100-sxm'\n[[events]]\nat = 4.0\nwhat = 'drain'"
    one = played(tmp_path, text)
    counts = outcomes(one)
    assert counts["aborted"] == 0
    assert counts["refused"] > 200
    assert one.summary["fleet"]["ended"] == 1


def test_a_slow_one_is_found_out_and_gets_less(tmp_path: Path) -> None:
    text = """
        router = "prefix"
        [[replicas]]
        hardware = "h100-sxm"
        [[replicas]]
        hardware = "h100-sxm"
        slow = 6
    """
    traffic = Traffic(rate=12.0, requests=600, input_tokens=2000, output_tokens=20, seed=3)
    one, blind = played(tmp_path, text, traffic), played(tmp_path, text.replace("prefix", "round-robin"), traffic)
    assert one.summary["ttft_ms"]["p90"] < 0.7 * blind.summary["ttft_ms"]["p90"]


def test_the_autoscaler_starts_and_ends_replicas_which_are_paid_for_while_they_are_there(
    tmp_path: Path,
) -> None:
    text = """
        router = "least-loaded"
        most_in_flight = 16
        [[replicas]]
        hardware = "h100-sxm"
        count = 0
        start_seconds = 5
        price = 3.6
        [autoscale]
        least = 0
        most = 4
        down_after = 10
    """
    one = played(tmp_path, text, Traffic(rate=20.0, requests=1200, input_tokens=800, output_tokens=200, seed=3))
    fleet, counts = one.summary["fleet"], outcomes(one)
    assert counts["finished"] == 1200
    assert fleet["most_up"] > 1
    ups = [up for _, up in fleet["up"]["series"]]
    assert ups[0] == 0
    assert max(ups) == fleet["most_up"]
    hours = fleet["kinds"][0]["device_hours"]
    assert 0 < hours < fleet["most_up"] * one.trail.seconds / 3600
    assert one.summary["cost"]["dollars"] == pytest.approx(3.6 * hours)
    assert one.summary["cost"]["dollars_per_gpu_hour"] == pytest.approx(3.6)


def test_while_one_is_repaired_the_autoscaler_starts_another(tmp_path: Path) -> None:
    text = """
        repair_seconds = 3600
        [[replicas]]
        hardware = "h100-sxm"
        start_seconds = 5
        [autoscale]
        [[events]]
        at = 2.0
    """
    one = played(tmp_path, text)
    assert one.summary["ttft_ms"]["max"] < 20_000
    assert one.summary["fleet"]["started"] > 1


def test_one_that_dies_is_busy_until_then_and_one_that_is_drained_is_not_replaced(tmp_path: Path) -> None:
    text = """
        repair_seconds = 1
        [[replicas]]
        hardware = "h100-sxm"
        count = 2
        [[events]]
        at = 1.0
        what = "drain"
        replica = 1
        [[events]]
        at = 1.5
        replica = 1
        [[events]]
        at = 2.0
        replica = 0
    """
    one = played(tmp_path, text, Traffic(rate=20.0, requests=60, input_tokens=80, output_tokens=2000, seed=3))
    fleet = one.summary["fleet"]
    assert (fleet["started"], fleet["ended"], fleet["failures"]) == (3, 1, 2)
    assert one.summary["steps"]["busy_share"] <= 1.01


def test_random_failures_depend_on_the_seed_alone(tmp_path: Path) -> None:
    text = "mtbf_hours = 0.002\nrepair_seconds = 1\n[[replicas]]\nhardware = 'h100-sxm'\ncount = 4"
    first, again = played(tmp_path, text), played(tmp_path, text)
    other = played(tmp_path, text, Traffic(rate=20.0, requests=400, input_tokens=800, output_tokens=60, seed=4))
    assert first.summary["fleet"]["failures"] > 3
    assert first.run.records == again.run.records
    assert outcomes(first) != outcomes(other)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "[[replicas]]: is needed"),
        ("[[replicas]]", "hardware: is needed"),
        ("[[replicas]]\nhardware = 'h100-sxm'\ncolour = 'red'", "colour"),
        ("[[replicas]]\nhardware = 'h100-sxm'\ncount = 0", "count: is 0"),
        ("[[replicas]]\nhardware = 'h100-sxm'\ncount = -1", "count: -1 is not"),
        ("[[replicas]]\nhardware = 'h100-sxm'\nmax_rows = 'x'", "max_rows: 'x' is not"),
        ("mtbf_hours = 0\n[[replicas]]\nhardware = 'h100-sxm'", "mtbf_hours: 0 is not"),
        ("router = 'x'\n[[replicas]]\nhardware = 'h100-sxm'", "router: 'x' is not one of"),
        ("scaled = 1\n[[replicas]]\nhardware = 'h100-sxm'", "scaled: 1; there are 1"),
        ("mtbf_hours = 1e308\n[[replicas]]\nhardware = 'h100-sxm'", "mtbf_hours: 1e+308 is not"),
        ("[[replicas]]\nhardware = 'h100-sxm'\ntp = 10000000000", "tp: 10000000000 is not"),
        (
            "[[replicas]]\nhardware = 'h100-sxm'\n[[replicas]]\nhardware = 'h100-sxm'\nmax_model_len = 64",
            "the same for",
        ),
        ("[[replicas]]\nhardware = 'h100-sxm'\n[autoscale]\nleast = 9", "9 is above most, 8"),
        ("replicas = 3", "tables, each headed"),
        ("autoscale = 3\n[[replicas]]\nhardware = 'h100-sxm'", "a table, headed"),
        ("[[replicas]]\nhardware = 'h100-sxm'\n[[replicas]]\nhardware = 'h100-sxm'\nblock_size = 64", "the same for"),
        ("x = [", "cannot read"),
    ],
)
def test_what_a_file_may_not_say(tmp_path: Path, text: str, sentence: str) -> None:
    with pytest.raises(BadInput, match=r"fleet\.toml") as caught:
        read(tmp_path, text)
    assert sentence in str(caught.value)


def test_a_file_without_end_is_refused() -> None:
    with pytest.raises(BadInput, match="larger than"):
        read_fleet(Path("/dev/zero"), EngineSetup())


def test_one_that_does_not_fit_is_named_by_its_number(tmp_path: Path) -> None:
    file = read(tmp_path, "[[replicas]]\nhardware = 'b200'\n[[replicas]]\nhardware = 'a10g'")
    with pytest.raises(BadInput, match=r"\[\[replicas\]\] 1: .*does not fit"):
        kinds_of(file, load_shape("llama-3.1-70b"), lambda name: (load_device(name), None))


@pytest.mark.parametrize("kind", [FleetOptions, KindOptions, Autoscale, Befalls])
def test_the_docs_hold_what_a_file_may_say_and_an_example_that_can_be_read(tmp_path: Path, kind: type[Options]) -> None:
    docs = (Path(__file__).parents[2] / "docs" / "fleet.md").read_text()
    for name, option in declared(kind).items():
        assert f"| `{name}` |" in docs
        assert f"| {option.accepted} | {option.help} |" in docs
    example = docs.split("```toml\n")[1].split("```")[0]
    assert len(read(tmp_path, example).kinds) == 2


def test_from_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "fleet.toml"
    path.write_text(f"model = '{MODEL}'\n[[replicas]]\nhardware = 'h100-sxm'\ncount = 2")
    asked = ["simulate", "--fleet", str(path), "--rate", "5", "--requests", "20", "--output-tokens", "10"]
    with pytest.raises(SystemExit) as done:
        main([*asked, "--json"])
    assert done.value.code in (0, None)
    assert json.loads(capsys.readouterr().out)["fleet"]["kinds"][0]["started"] == 2
    with pytest.raises(SystemExit):
        main(asked)
    assert "at most 2 replicas up; 0 ended, 0 failed" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main([*asked, "--replicas", "3"])
    assert "--replicas: cannot be combined with --fleet" in capsys.readouterr().err
