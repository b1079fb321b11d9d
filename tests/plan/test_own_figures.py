"""Devices and prices of a user's own: read from TOML, checked figure by figure, and never mixed on two price bases."""

from __future__ import annotations

from pathlib import Path

import pytest

from headway.core.errors import BadInput
from headway.plan import options
from headway.plan.catalogue import hardware
from headway.plan.quotes import own_prices, quoted
from headway.roofline.hardware import find_hardware, hardware_catalogue
from headway.roofline.own_hardware import read_devices
from tests.plan.test_plan_cli import answer, plan

MINE = """
[board]
memory = 48e9
bandwidth = 1.2e12
peaks = { bf16 = 3e14, fp8 = 6e14 }
link = { name = "PCIe5", bandwidth = 6.4e10, group = 8 }
power = 350
price = { on-demand = 1.2, owned = { typical = 0.7, low = 0.6, high = 0.8, date = "2026-11", source = "our books" } }
"""
STEP = ("--model", "llama-3.1-8b", "--batch", "8")


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    path = tmp_path / "mine.toml"
    path.write_text(MINE)
    return path


def test_every_verb_takes_a_device_of_a_file(mine: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert answer(["step", *STEP, "--hardware", str(mine)], capsys)["hardware"] == "board"
    found = answer(["cost", *STEP, "--hardware", f"{mine}:board", "--price-basis", "owned"], capsys)
    assert (found["price_per_gpu_hour"], found["price_basis"]) == (0.7, "owned")
    load = ["--rate", "1", "--input-tokens", "500", "--output-tokens", "100", "--degrees", "1"]
    found = answer(["search", "--model", "llama-3.1-8b", "--hardware", f"h100,{mine}", *load], capsys)
    assert {row["hardware"] for row in found["deployments"]} == {"board", "h100-sxm"}
    assert [device.name for device in hardware(str(mine)).devices] == ["board"]


@pytest.mark.parametrize(("text", "said"), [
    ("", "one [device] or more"), ("memory = 1", "one [device] or more"), ("[x", "cannot read"),
    ("x=" + "[" * 100_000, "cannot read"), ("[x]\nmemory=" + "1" * 5000, "cannot read"),
    ("[x]\nmemory = 48\nbandwidth = 1e12", "[x] memory: 48; accepted: bytes above 1e+08"),
    ("[x]\nmemory = 48e9", "missing required field `bandwidth`"),
    ("[x]\nmemory = 48e9\nbandwidth = 900", "[x] bandwidth: 900; accepted: bytes/s above 1e+09"),
    ("[x]\nmemory = 48e9\nbandwidth = 'fast'", "[x] Expected `float`, got `str`"),
    ("[x]\nmemory = 48e9\nbandwith = 1e12", "[x] bandwith: unknown; accepted: "),
    ("[x]\nmemory = 48e9\nbandwidth = 1e12\npeaks = { fast = 1e15 }", "peaks.fast: not a number format"),
    ("[x]\nmemory = 48e9\nbandwidth = 1e12\npeaks = { bf16 = -1 }", "peaks.bf16: -1; accepted: FLOP/s above"),
    ("[x]\nmemory = 48e9\nbandwidth = 1e12\nkind = 'fpga'", "accepted: gpu, tpu, cpu"),
    ("[x]\nmemory = 48e9\nbandwidth = nan", "accepted: bytes/s above"),
    ("[x]\nmemory = 48e9\nbandwidth = 1e12\nprice = 2", "price; accepted: dollars by basis"),
    ("[x]\nmemory = 48e9\nbandwidth = 1e12\nprice = { rent = 2 }", "rent: not a price basis; accepted: on-demand"),
    ("[x]\nmemory = 48e9\nbandwidth = 1e12\nprice = { spot = { low = 3, typical = 2 } }", "low <= typical"),
])  # fmt: skip
def test_a_file_of_devices_is_refused_with_the_figure_that_cannot_be(text: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "bad.toml"
    path.write_text(text)
    with pytest.raises(BadInput) as caught:
        read_devices(str(path))
    assert said in str(caught.value) and "--hardware" in str(caught.value)


def test_a_device_must_be_named_where_a_file_has_several(mine: Path) -> None:
    mine.write_text(MINE + "[other]\nmemory = 24e9\nbandwidth = 1e12\n")
    with pytest.raises(BadInput, match=r"has no \[third\]; it has board, other"):
        read_devices(f"{mine}:third")
    with pytest.raises(BadInput, match="several devices; name one"):
        options.load_device(str(mine))


def test_prices_of_a_file_stand_on_their_basis(tmp_path: Path) -> None:
    path = tmp_path / "prices.toml"
    path.write_text('[h100]\n1-year = 1.8\nspot = { typical = 1.1, date = "2026-11", source = "console" }\n')
    device, prices = find_hardware("h100"), str(path)
    assert quoted(device, None, prices, "1-year").usd == 1.8
    assert (
        quoted(device, None, prices, "spot").line().startswith("h100-sxm at $1.10 per GPU-hour (spot), as of 2026-11")
    )
    assert quoted(device, None, prices).usd == device.price["on-demand"].typical
    assert quoted(device, 5.0, prices, "spot").basis == "given"
    for bad, said in (("[h999]\nspot = 1", "h999"), ("[h100]\nspot = -1", "0 <= low"), ("[h100]\nrent = 1", "basis")):
        path.write_text(bad)
        with pytest.raises(BadInput, match=said):
            own_prices(prices)


def test_a_price_that_is_not_known_on_a_basis_is_refused_with_those_that_are() -> None:
    with pytest.raises(BadInput, match="gb300 has no spot price; it has owned, 3-year"):
        quoted(find_hardware("gb300"), None, None, "spot")
    with pytest.raises(BadInput, match="accepted: on-demand, 1-year, 3-year, owned, spot"):
        quoted(find_hardware("gb300"), None, None, "rent")


@pytest.mark.parametrize("basis", [None, "owned", "3-year", "spot"])
def test_a_ranking_never_mixes_price_bases(basis: str | None) -> None:
    found = options.find("llama-3.1-8b", "all", 1.0, price_basis=basis, degrees=(1,), most=99, split=False)
    assert {row.price_basis for row in found.deployments} == {found.price_basis} == {basis or "on-demand"}
    for row in found.deployments:
        assert row.price_per_gpu_hour == hardware_catalogue()[row.hardware].price[found.price_basis].typical
    left_out = [row for row in found.rejected if "--price-basis" in row.reason]
    assert left_out and all(found.price_basis in row.reason for row in left_out)


def test_the_basis_is_the_one_most_devices_have() -> None:
    assert options.find("llama-3.1-8b", "gb300,mi355x,h100", 1.0, degrees=(1,)).price_basis == "3-year"


@pytest.mark.parametrize("name", [
    "gh200", "rtx-6000-ada", "l40", "a6000", "h20", "v100", "dgx-spark", "mi325x", "gaudi2", "gaudi3", "tpu-v7",
])  # fmt: skip
def test_devices_are_known_by_their_usual_names(name: str) -> None:
    assert find_hardware(name).bandwidth > 1e11


@pytest.mark.parametrize("verb", ["prefill", "estimate", "levers", "ratio", "cost"])
def test_a_device_without_a_peak_refuses_what_arithmetic_decides(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    asked = [verb, "--model", "llama-3.1-8b", "--hardware", "m4-max", *(["--price", "1"] if verb == "cost" else [])]
    plan(asked, capsys, 2)
    assert answer([*asked, "--peak-tflops", "30"], capsys)["hardware"] == "m4-max"


@pytest.mark.parametrize("verb", ["step", "frontier", "capacity", "explain"])
def test_a_device_without_a_peak_is_modelled_by_its_memory_and_says_so(
    verb: str, capsys: pytest.CaptureFixture[str]
) -> None:
    found = answer([verb, "--model", "llama-3.1-8b", "--hardware", "m4-max"], capsys)
    assert any("no catalogued peak" in note for note in found["notes"])
