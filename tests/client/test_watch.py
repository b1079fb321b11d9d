"""What `headway top` makes of two readings of /metrics."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from headway.cli.top import spark, table
from headway.client.watch import parse, view

BEFORE = """headway:requests_running{model_name="m"} 2
headway:generation_tokens_total{model_name="m"} 100
headway:kv_cache_usage{model_name="m"} 0.5
headway:step_time_ratio{model_name="m"} 1.1
headway:step_time_error{model_name="m"} 0.12
headway:billed_seconds_total{model_name="m",key="aaaaaaaaaaaaaaaa"} 1.0
headway:billed_seconds_total{model_name="m",key="bbbbbbbbbbbbbbbb"} 5.0
"""
AFTER = BEFORE.replace("} 100", "} 150").replace('a"} 1.0', 'a"} 4.0').replace('b"} 5.0', 'b"} 6.0')


def test_keys_share_what_was_billed_between_two_readings() -> None:
    now = view(parse(BEFORE, 10.0), parse(AFTER, 15.0))
    assert now.output_rate == 10 and now.step_error == 0.12
    assert now.keys == (("aaaaaaaaaaaaaaaa", 0.75), ("bbbbbbbbbbbbbbbb", 0.25))
    assert view(parse(AFTER, 15.0), parse(AFTER, 16.0)).keys == ()


@pytest.mark.parametrize(
    ("course", "most", "line"),
    [((), None, ""), ((0, 0), None, "▁▁"), ((1, 4, 8), None, "▂▅█"), ((0.5, 1.0), 1.0, "▅█"), ((3,), 6.0, "▅")],
)
def test_a_course_is_a_line_of_bars(course: tuple[float, ...], most: float | None, line: str) -> None:
    assert spark(course, most) == line


def test_the_table_shows_keys_errors_and_courses() -> None:
    now = view(parse(BEFORE, 10.0), parse(AFTER, 15.0))
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(table(now, 5.0, [now, now]))
    text = console.export_text()
    assert "aaaaaaaa 75%, bbbbbbbb 25%" in text and "12% off" in text and "██" in text
