"""Every checkable figure of the three source texts, at its tolerance (tests/data/figures.json)."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from headway.roofline.capacity import memory_batch
from headway.roofline.collectives import all_reduce_of
from headway.roofline.cost import price_ratio, price_table, token_cost, usd_per_million
from headway.roofline.frontier import ceiling, knee
from headway.roofline.hardware import find_hardware
from headway.roofline.replica import (
    Replica,
    attention_overtakes,
    best_degree_continuous,
    decode,
    deploy,
    prefill,
    tensor_parallel,
)
from headway.roofline.speculation import Draft, expected_tokens, speedup
from headway.roofline.utilisation import mbu
from headway.shape.catalogue import find_model
from headway.shape.model import KVGroup, kv_bytes

FIGURES = {
    figure["id"]: figure
    for figure in json.loads((Path(__file__).parents[1] / "data/figures.json").read_text())["figures"]
}


def replica(given: dict[str, Any]) -> Replica:
    """The deployment a figure's inputs describe."""
    d = deploy(
        find_model(given["model"]),
        find_hardware(given.get("hardware", "h100")),
        given.get("n_gpu", given.get("n_tp", given.get("gpus", 1))),
        precision=given.get("precision"),
        kv="fp8" if given.get("s_kv") == 1 else None,
        peak=given.get("pi"),
    )
    if "alpha" in given and "link" in given:
        d = msgspec.structs.replace(d, all_reduce=all_reduce_of("ring", given["link"], given["alpha"]))
    return d


def at(given: dict[str, Any]) -> dict[int, float]:
    """Seconds of the batch-1 step at each tensor-parallel degree."""
    degrees = [1, 2, 4, 8]
    return {
        n: cost.seconds for n, cost in tensor_parallel(replica(given), degrees, given["B"], given.get("T", 0)).items()
    }


def fit(given: dict[str, Any]) -> dict[str, float]:
    d = replica(given)
    batch = memory_batch(d, given["T"])
    return {"B": batch, "tok_s": batch / decode(d, batch, given["T"]).seconds}


def step(given: dict[str, Any]) -> float:
    return decode(replica(given), given.get("B", 1), given.get("T", 0)).seconds


def node(given: dict[str, Any]) -> dict[str, float]:
    with_reduce = replica(given)
    alone = msgspec.structs.replace(with_reduce, all_reduce=None)
    tokens = given["B"]
    return {
        "roofline_tok_s": tokens / decode(alone, given["B"], given["T"]).seconds,
        "with_allreduce_tok_s": tokens / decode(with_reduce, given["B"], given["T"]).seconds,
    }


def node_cost(given: dict[str, Any]) -> dict[str, float]:
    speeds = node(given | {"alpha": 2e-6, "link": 450e9})
    hour = given["gpus"] * given["price"]
    cost = token_cost(replica(given), given["B"], given["T"], given["price"], mfu=given["mfu"])
    return {
        "output_roofline": usd_per_million(hour, speeds["roofline_tok_s"]),
        "output_allreduce": usd_per_million(hour, speeds["with_allreduce_tok_s"]),
        "input_2000_mfu50": cost.usd_per_million_input,
    }


def table(given: dict[str, Any]) -> dict[str, float]:
    rows = price_table(replica(given), [1, 8, 64, 256], 8192, given["price_node_hour"] / given["n_gpu"])
    return {str(row.batch): row.usd_per_million_output for row in rows}


def input_cost(given: dict[str, Any]) -> dict[str, float]:
    d = replica(given | {"precision": "fp8"})
    price = given["price_node_hour"] / given["n_gpu"]
    cost = token_cost(d, 1, 0, price, mfu=given["mfu"], prefill_attention=False)
    return {"usd": cost.usd_per_million_input, "tok_s": cost.prefill_tokens_per_second}


def multi_head(given: dict[str, Any]) -> dict[str, float]:
    """Figures given by layers and width, without a model."""
    width = given["width"] // given.get("group", 1)
    group = KVGroup("full", tuple(range(given["L"])), 1, width, width)
    return {"per_token": kv_bytes((group,), 1), "ctx_128k": kv_bytes((group,), 128 * 1024)}


COMPUTE: dict[str, Callable[[dict[str, Any]], Any]] = {
    "step-b1": step,
    "step-b64": step,
    "thr-b64": lambda g: g["B"] / step(g),
    "bound-b512": lambda g: decode(replica(g), g["B"], g["T"]).binds,
    "prefill-2000": lambda g: prefill(replica(g), g["T_in"], g["mfu"]).seconds,
    "prefill-attn-cross-8b": lambda g: attention_overtakes(find_model(g["model"])),
    "prefill-attn-cross-70b": lambda g: attention_overtakes(find_model(g["model"])),
    "fit-512": fit,
    "fit-4096": fit,
    "fit-32768": fit,
    "ceiling-4096": lambda g: ceiling(replica(g), g["T"]),
    "ridge": lambda g: find_hardware(g["hardware"]).peaks["bf16"] / find_hardware(g["hardware"]).bandwidth,
    "tp-speed-of-light": lambda g: decode(replica(g), 1, 0).terms["weights"],
    "tp-latency": lambda g: at(g)[8],
    "tp-best": lambda g: best_degree_continuous(replica(g), g["alpha"]),
    "tp-5us": lambda g: "t(8) > t(4)" if at(g)[8] > at(g)[4] else "t(8) <= t(4)",
    "node-70b": node,
    "cost-70b": node_cost,
    "ratio-8b": lambda g: price_ratio(replica(g), g["B"], g["T"], g["mfu"]),
    "ratio-70b": lambda g: price_ratio(replica(g), g["B"], g["T"], g["mfu"]),
    "moe-knee": lambda g: knee(replica(g)),
    "mbu": lambda g: mbu(g["bytes"], g["tpot"], g["beta"]),
    "step-405b": step,
    "kv-405b": lambda g: kv_bytes(replica(g).shape, 1),
    "cap-405b": lambda g: g["free_bytes"] / kv_bytes(replica(g).shape, g["T"]),
    "cost-405b": table,
    "cost-405b-in": input_cost,
    "prefill-405b": lambda g: prefill(replica(g), g["T_in"], g["mfu"], attention=False).seconds,
    "spec-speedup": lambda g: speedup(Draft(g["alpha"], g["c"]), g["k"]),
    "kv-70b-mha": multi_head,
    "kv-70b-gqa": multi_head,
} | {
    f"spec-{k}-{a}": (lambda g: expected_tokens(g["k"], g["alpha"])) for k in (2, 4, 8) for a in (0.6, 0.8, 0.9)
}  # fmt: skip


@pytest.mark.parametrize("name", FIGURES)
def test_figure(name: str) -> None:
    figure = FIGURES[name]
    got, expected, tolerance = COMPUTE[name](figure["inputs"]), figure["expect"], figure["rel_tol"]
    if isinstance(expected, str):
        assert got == expected
    elif isinstance(expected, dict):
        for key, value in expected.items():
            if value is not None:
                assert got[key] == pytest.approx(value, rel=tolerance), key
    else:
        assert got == pytest.approx(expected, rel=tolerance)


def test_table_says_which_batches_do_not_fit() -> None:
    d = deploy(find_model("llama-3.1-405b"), find_hardware("h100"), 8, precision="fp8", kv="fp8")
    fits = {row.batch: row.fits for row in price_table(d, [1, 8, 64, 110, 111, 256], 8192, 3.0)}
    assert fits == {1: True, 8: True, 64: True, 110: True, 111: False, 256: False}
