"""The command lines that run a planned deployment: vLLM's, SGLang's, and on a CPU Headway's own."""

from __future__ import annotations

from math import ceil
from typing import Any

from headway.plan.traffic import Traffic
from headway.roofline.deployment import MEMORY_SHARE
from headway.shape.catalogue import hub_id
from headway.shape.model import ModelShape


def engine_flags(
    model: str, shape: ModelShape, row: dict[str, Any], traffic: Traffic, kv: str | None
) -> dict[str, str]:
    """One command per engine that can run it, for one replica of `row` (for a split deployment: of its decode pool)."""
    name = hub_id(shape.name) or model
    longest = _longest(shape, traffic)
    requantised = row["precision"] != shape.weight_format
    tp, dp = row["gpus"] // row["attention_dp"], row["attention_dp"]
    vllm = [
        f"vllm serve {name}", f"--tensor-parallel-size {tp}", f"--max-num-seqs {row['peak_batch']}",
        f"--max-num-batched-tokens {max(row['chunk'], row['peak_batch'])}", f"--max-model-len {longest}",
        f"--gpu-memory-utilization {MEMORY_SHARE}", "--enable-prefix-caching",
    ]  # fmt: skip
    sglang = [
        f"python -m sglang.launch_server --model-path {name}", f"--tp {row['gpus']}",
        f"--max-running-requests {row['peak_batch']}", f"--chunked-prefill-size {row['chunk']}",
        f"--context-length {longest}", "--mem-fraction-static 0.88",
    ]  # fmt: skip
    if dp > 1:
        vllm += [f"--data-parallel-size {dp}", "--enable-expert-parallel"]
        sglang += ["--enable-dp-attention", f"--dp {dp}"]
    if requantised and row["precision"] == "fp8":
        vllm.append("--quantization fp8")
        sglang.append("--quantization fp8")
    elif requantised:
        note = f"  # needs a checkpoint quantised to {row['precision']}"
        vllm.append(note)
        sglang.append(note)
    if kv == "fp8":
        vllm.insert(-1, "--kv-cache-dtype fp8")
        sglang.insert(-1, "--kv-cache-dtype fp8_e4m3")
    commands = {"vllm": " ".join(vllm), "sglang": " ".join(sglang)}
    if row["hardware_kind"] != "cpu":  # `headway serve` computes on the CPU alone
        return commands
    headway = [
        f"headway serve {name}", f"--max-rows {row['peak_batch']}", f"--max-step-tokens {row['chunk']}",
        f"--max-model-len {longest}",
    ]  # fmt: skip
    if row["tpot_ms"]:
        headway.append(f"--step-ms {row['tpot_ms']:.0f}")
    return {"headway": " ".join(headway)} | commands


def _longest(shape: ModelShape, traffic: Traffic) -> int:
    """Context limit to set: what the traffic needs, rounded up to 1024, never above the model's own."""
    need = traffic.longest or ceil(2 * (traffic.input_tokens + traffic.output_tokens))
    rounded = ceil(need / 1024) * 1024
    return min(rounded, shape.context) if shape.context else rounded
