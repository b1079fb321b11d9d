"""Targets as they are written."""

from __future__ import annotations

import pytest

from headway.core.errors import BadInput
from headway.core.slo import parse_slo


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("", {}),
        ("ttft=1s,tpot=50ms,e2e=20s", {"ttft": 1.0, "tpot": 0.05, "e2e": 20.0}),
        (" ttft = 1.5 s , tpot=900us,", {"ttft": 1.5, "tpot": 0.0009}),
        ("e2e=1e3ms", {"e2e": 1.0}),
    ],
)
def test_targets_are_read_as_seconds(text: str, seconds: dict[str, float]) -> None:
    assert parse_slo(text) == pytest.approx(seconds)


@pytest.mark.parametrize(
    "text",
    ["ttft", "ttft=", "ttft=200", "ttft=soon", "ttft=1m", "ttft=-1s", "ttft=0", "ttft=1.2.3", "latency=1s",
     "ttft=1s,ttft=2s", "ttft=1s;tpot=2s", "ttft=inf", "ttft=nan", "ttft=1e999s"],
)  # fmt: skip
def test_anything_else_is_refused(text: str) -> None:
    with pytest.raises(BadInput, match="--goal"):
        parse_slo(text, field="--goal")


def test_only_the_names_asked_for_are_accepted_and_listed() -> None:
    with pytest.raises(BadInput, match="accepted: ttft=1s, tpot=50ms, with") as error:
        parse_slo("e2e=1s", ("ttft", "tpot"))
    assert "e2e=" not in str(error.value).partition("accepted")[2]
