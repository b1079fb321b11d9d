"""Users with think time in place of a rate, sessions, and the power that serving them draws."""

from __future__ import annotations

from pathlib import Path

import pytest

from headway.core.errors import BadInput
from headway.plan import options
from headway.plan.traffic import of_users
from headway.roofline.hardware import find_hardware
from tests.plan.test_plan_cli import answer

ASKED = ["search", "--model", "llama-3.1-8b", "--hardware", "h100", "--degrees", "1,2", "--slo", "ttft=1s,tpot=40ms"]


def test_users_ask_again_once_they_were_answered_and_have_thought(capsys: pytest.CaptureFixture[str]) -> None:
    found = answer([*ASKED, "--users", "400", "--think-time", "20", "--most", "99"], capsys)["deployments"]
    assert found
    for row in found:  # N = rate * (think + response), within what a mean and a percentile differ by
        response = 400 / row["rate"] - 20
        assert 0 < response < (row["ttft_ms"] + 500 * row["tpot_ms"]) / 1e3
        assert response > 0.5 * 500 * row["mean_tpot_ms"] / 1e3
        assert row["utilisation"] == pytest.approx(row["rate"] / row["goodput"])


def test_more_thought_is_less_load(capsys: pytest.CaptureFixture[str]) -> None:
    rates = [
        answer([*ASKED, "--users", "400", "--think-time", think], capsys)["deployments"][0]["rate"]
        for think in ("5", "30", "120")
    ]
    assert rates == sorted(rates, reverse=True)


def test_a_sessions_turn_is_prompted_with_all_that_was_said_before() -> None:
    once, four = of_users(10, 30, 1, 500, 100), of_users(10, 30, 4, 500, 100)
    assert (once.input_tokens, once.cache_hit) == (500, 0)
    assert four.input_tokens == 500 + 1.5 * 600 and four.fresh_tokens == pytest.approx(500)
    assert four.longest == 4 * 600


@pytest.mark.parametrize(("given", "option"), [
    ({"users": 0.0}, "--users"), ({"users": 1e308}, "--users"),
    ({"turns": 3, "rate": 1.0}, "--turns"),
    ({"users": 5.0, "think_time": -1.0}, "--think-time"),
    ({"users": 5.0, "turns": 0}, "--turns"), ({"users": 5.0, "rate": 2.0}, "--users"),
    ({"users": 5.0, "trace": Path("x.csv")}, "--users"), ({}, "--rate"),
])  # fmt: skip
def test_impossible_users_are_refused(given: dict[str, float], option: str) -> None:
    with pytest.raises(BadInput, match=f"^{option}"):
        options.find("llama-3.1-8b", "h100", **given)  # type: ignore[arg-type]


def test_energy_follows_from_label_watts_and_use(capsys: pytest.CaptureFixture[str]) -> None:
    watts = find_hardware("h100").power
    for row in answer([*ASKED, "--rate", "10"], capsys)["deployments"]:
        drawn = row["total_gpus"] * watts * (0.2 + 0.8 * row["utilisation"])
        assert row["watts"] == pytest.approx(drawn)
        assert row["joules_per_output_token"] == pytest.approx(drawn / (10 * 500))
    unknown = answer([*ASKED[:4], "a10g", "--prices", "a10g=1", "--rate", "1"], capsys)["deployments"]
    assert unknown and all(row["watts"] is None for row in unknown)
