"""Estimates beside bounds: what an engine's requests cost, how many it serves in time, and what prices imply."""

from __future__ import annotations

import pytest

from tests.plan.test_plan_cli import STEP, answer, plan

SETUP = STEP[1:]


def test_cost_gives_an_estimate_with_its_range_beside_the_bound(capsys: pytest.CaptureFixture[str]) -> None:
    found = answer(["cost", *SETUP, "--batch", "64"], capsys)
    served = found["served"]
    output = served["usd_per_million_output"]
    assert output["p10"] < output["p50"] < output["p90"] and served["validated"]
    assert output["p50"] > found["usd_per_million_output"]  # a bound is cheaper
    request = served["usd_per_request"]["p50"]
    parts = (served["usd_per_million_input"]["p50"] * 2000 + output["p50"] * 500) / 1e6
    assert request == pytest.approx(parts)
    hits = answer(["cost", *SETUP, "--batch", "64", "--cache-hit", "0.9"], capsys)["served"]
    assert hits["usd_per_request"]["p50"] < request and not hits["validated"]
    assert "no range" in plan(["cost", *SETUP, "--batch", "64", "--cache-hit", "0.9"], capsys)


def test_verbs_say_why_they_have_no_estimate(capsys: pytest.CaptureFixture[str]) -> None:
    setup = ["--model", "llama-3.1-8b", "--hardware", "mi300x"]
    found = answer(["cost", *setup], capsys)
    assert found["served"] is None and "no measured runs on mi300x" in found["abstained"]
    for verb in ("frontier", "capacity"):
        assert "no estimate of served requests: no measured runs on mi300x" in plan([verb, *setup], capsys)
    assert all(lever["estimated"] is None for lever in answer(["levers", *setup], capsys)["levers"])


def test_capacity_is_smaller_by_the_estimate_and_smaller_still_to_be_sure(capsys: pytest.CaptureFixture[str]) -> None:
    found = answer(["capacity", *SETUP, "--tpot-ms", "30"], capsys)
    assert found["surely"]["load"] <= found["served"]["load"] <= found["batch"]
    assert found["surely"]["tpot"]["p90"] <= 0.030 and found["served"]["tpot"]["p50"] <= 0.030


def test_levers_are_ranked_by_what_a_request_costs(capsys: pytest.CaptureFixture[str]) -> None:
    rag = ["--input-tokens", "8000", "--output-tokens", "100"]
    levers = answer(["levers", *SETUP, *rag], capsys)["levers"]
    assert levers[0]["name"] == "prefix cache" and levers[0]["estimated"] > 1.3


def test_invoice_prices_leave_the_margin_that_was_asked_for_and_back(capsys: pytest.CaptureFixture[str]) -> None:
    wanted = answer(["invoice", *SETUP, "--margin", "0.4"], capsys)
    prices = [f"--{name}-price={wanted[f'{name}_price']}" for name in ("input", "cached", "output")]
    found = answer(["invoice", *SETUP, *prices], capsys)
    assert found["margin"] == pytest.approx(0.4) and found["rows"][-1]["margin"] == pytest.approx(0.4)
    assert 1 < found["break_even_batch"] < found["rows"][-1]["batch"]
    poor = answer(["invoice", *SETUP, "--input-price", "0.001", "--output-price", "0.01"], capsys, 1)
    assert poor["break_even_batch"] is None
    plan(["invoice", *SETUP, "--input-price", "0.1"], capsys, 2)
