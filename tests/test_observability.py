"""The board and the alert rules in deploy/ against /metrics: every series they name is one that it prints."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from headway.engine.ipc import Status
from headway.serve.hosted import HostedModel, Served
from headway.serve.metrics import HttpDone, LoopLag, ServerMetrics, render
from tests.serve.scripted import ByteTokenizer

DEPLOY = Path(__file__).parents[1] / "deploy"
NAME = re.compile(r"\b((?:headway|vllm):[a-z_]+)(?:\{([^}]*)\})?")


@pytest.fixture(scope="module")
def printed() -> dict[str, set[str]]:
    """Names that /metrics prints -> their labels."""
    model = HostedModel(Served(model="m", load_text=ByteTokenizer))
    model._metrics._seen.predicted = 1  # steps are predicted on machines that were measured
    for fold in (model._metrics.totals.refused, model._metrics.totals.blocked):
        fold["why"] = 1
    model._metrics._seen.billed["key"] = 1
    server = ServerMetrics("m")
    server.fold(HttpDone("/v1/models", 200))
    server.fold(LoopLag(0.1))
    model.link.status = Status(blocks=1)
    found: dict[str, set[str]] = {}
    for line in render([*server.series(), *model.series()]).splitlines():
        if not line.startswith("#"):
            name, _, rest = line.partition("{")
            found.setdefault(name.partition(" ")[0], set()).update(re.findall(r'(\w+)="', rest))
    return found


def check(expression: str, printed: dict[str, set[str]]) -> None:
    assert expression.count("(") == expression.count(")") and expression.count("{") == expression.count("}")
    named = NAME.findall(expression)
    assert named or expression.startswith("up{"), expression
    labels = set().union(*(printed.get(name, set()) for name, _ in named)) | {"instance", "job"}
    for name, chosen in named:
        assert name in printed, f"{name} in {expression}"
        assert set(re.findall(r"(\w+)(?:=|!)", chosen)) <= printed[name], expression
    for group in re.findall(r"by \(([^)]*)\)", expression):
        assert {label.strip() for label in group.split(",")} <= labels, expression


def test_every_expression_of_the_board_names_what_metrics_prints(printed: dict[str, set[str]]) -> None:
    board = json.loads((DEPLOY / "grafana.json").read_text())
    panels: list[dict[str, Any]] = board["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels) >= 12
    for panel in panels:
        for target in panel["targets"]:
            check(target["expr"], printed)
            shown = set(re.findall(r"{{(\w+)}}", target["legendFormat"]))
            assert shown <= set().union(*(printed[name] for name, _ in NAME.findall(target["expr"])))
    (variable,) = [one for one in board["templating"]["list"] if one["name"] == "model"]
    name, label = re.findall(r"label_values\((.*), (\w+)\)", variable["query"]["query"])[0]
    assert label in printed[name]


def test_every_alert_names_what_metrics_prints(printed: dict[str, set[str]]) -> None:
    yaml = pytest.importorskip("yaml")
    (group,) = yaml.safe_load((DEPLOY / "alerts.yml").read_text())["groups"]
    for rule in group["rules"]:
        assert set(rule) <= {"alert", "expr", "for", "labels", "annotations"}
        assert rule["labels"]["severity"] in ("critical", "warning", "info") and rule["annotations"]["summary"]
        check(rule["expr"], printed)


def test_gateways_find_the_names_they_look_for(printed: dict[str, set[str]]) -> None:
    """The Gateway API's endpoint picker and llm-d by default, and what vLLM's Grafana board reads."""
    names = ("num_requests_waiting", "num_requests_running", "kv_cache_usage_perc", "cache_config_info")
    board = (
        "time_to_first_token_seconds_bucket", "inter_token_latency_seconds_bucket",
        "e2e_request_latency_seconds_bucket",
        "prompt_tokens_total", "generation_tokens_total", "request_success_total", "request_queue_time_seconds_sum",
        "request_prefill_time_seconds_sum", "request_decode_time_seconds_sum", "request_prompt_tokens_bucket",
        "request_generation_tokens_bucket",
    )  # fmt: skip
    assert {f"vllm:{name}" for name in (*names, *board)} <= printed.keys()
    assert {"block_size", "num_gpu_blocks", "model_name"} <= printed["vllm:cache_config_info"]
