"""The command lines that run a planned deployment: vLLM's and SGLang's, or TensorRT-LLM's; on a CPU Headway's own."""

from __future__ import annotations

import shlex
from math import ceil

from headway.plan.answers_lists import Offer
from headway.roofline.hardware import UTILISATION
from headway.shape.catalogue import hub_id
from headway.shape.model import ModelShape

PORTS = {"prefill": 8100, "decode": 8200}
KV_ROLE = {"prefill": "kv_producer", "decode": "kv_consumer"}


def engine_flags(model: str, shape: ModelShape, row: Offer, kv: str | None, engine: str) -> dict[str, str]:
    """By engine, the lines that run one replica of each kind that `row` has. A split deployment has one for prefill,
    one for decode and a proxy before them; hosts are called prefill-1, decode-1 and so on. `engine`: whose constants
    the row was planned with; others' lines are given where they take the same settings."""
    name = shlex.quote(model if "/" in model else hub_id(shape.name) or model)
    if engine == "trtllm" and row.hardware_kind != "cpu":
        return {"trtllm": _trtllm(name, shape, row, kv)}
    vllm = _vllm(name, shape, row, kv)
    sglang = _sglang(name, shape, row, kv)
    if row.prefill_replicas:
        return {"vllm": _split_vllm(vllm, row), "sglang": _split_sglang(sglang, row)}
    if row.hardware_kind != "cpu":  # `headway serve` computes on the CPU alone
        return {"vllm": vllm, "sglang": sglang}
    headway = (
        f"headway serve {name} --max-rows {row.rows} --max-step-tokens {row.chunk} "
        f"--max-model-len {row.max_model_len} --step-ms {max(1, round(row.tpot_ms))}"
    )
    return {"headway": headway, "vllm": vllm, "sglang": sglang}


def _vllm(name: str, shape: ModelShape, row: Offer, kv: str | None) -> str:
    """vLLM counts sequences and tensor-parallel GPUs per data-parallel rank."""
    ranks = row.attention_dp
    return " ".join([
        f"vllm serve {name}", f"--tensor-parallel-size {row.gpus // ranks}",
        *([f"--data-parallel-size {ranks}"] if ranks > 1 else []),
        *(["--enable-expert-parallel"] if ranks > 1 and shape.is_moe else []),
        f"--max-num-seqs {ceil(row.rows / ranks)}",
        f"--max-num-batched-tokens {max(row.chunk, row.rows)}", f"--max-model-len {row.max_model_len}",
        f"--gpu-memory-utilization {UTILISATION}", "--enable-prefix-caching",
        *(["--kv-cache-dtype fp8"] if kv == "fp8" else []), *_requantised(shape, row.precision),
    ])  # fmt: skip


def _sglang(name: str, shape: ModelShape, row: Offer, kv: str | None) -> str:
    """SGLang counts sequences and GPUs of the whole replica."""
    ranks = row.attention_dp
    return " ".join([
        f"python -m sglang.launch_server --model-path {name}", f"--tp {row.gpus}",
        *(["--enable-dp-attention", f"--dp {ranks}"] if ranks > 1 else []),
        f"--max-running-requests {row.rows}", f"--chunked-prefill-size {row.chunk}",
        f"--context-length {row.max_model_len}", "--mem-fraction-static 0.88",
        *(["--kv-cache-dtype fp8_e4m3"] if kv == "fp8" else []), *_requantised(shape, row.precision),
    ])  # fmt: skip


def _trtllm(name: str, shape: ModelShape, row: Offer, kv: str | None) -> str:
    """TensorRT-LLM counts sequences per data-parallel rank, and reads the rest from a file of settings."""
    ranks = row.attention_dp
    settings = [
        *(["enable_attention_dp: true"] if ranks > 1 else []),
        "kv_cache_config:", f"  free_gpu_memory_fraction: {UTILISATION}", *(["  dtype: fp8"] if kv == "fp8" else []),
        *(["cache_transceiver_config:", "  backend: DEFAULT"] if row.prefill_replicas else []),
    ]  # fmt: skip
    parallel = [f"--tp_size {row.gpus}", *([f"--ep_size {row.gpus}"] if ranks > 1 and shape.is_moe else [])]
    comment = "" if row.precision == shape.weight_format else f"  # needs a checkpoint quantised to {row.precision}"
    serve = " ".join([
        f"trtllm-serve {name} --backend pytorch", *parallel, f"--max_batch_size {ceil(row.rows / ranks)}",
        f"--max_num_tokens {max(row.chunk, row.rows)}", f"--max_seq_len {row.max_model_len}",
        "--extra_llm_api_options settings.yaml",
    ])  # fmt: skip
    written = ["cat > settings.yaml <<END", *settings, "END"]
    if not row.prefill_replicas:
        return "\n".join([*written, serve + comment])
    workers = [f"{serve} --host 0.0.0.0 --port {port}{comment}" for port in PORTS.values()]
    pools = ["hostname: 0.0.0.0", "port: 8000"]
    for title, role in (("context_servers", "prefill"), ("generation_servers", "decode")):
        hosts = _hosts(role, row)
        pools += [f"{title}:", f"  num_instances: {len(hosts)}", "  urls:"]
        pools += [f'    - "{host}:{PORTS[role]}"' for host in hosts]
    router = ["cat > pools.yaml <<END", *pools, "END", "trtllm-serve disaggregated -c pools.yaml"]
    return "\n".join([*written, *workers, *router])


def _requantised(shape: ModelShape, precision: str) -> list[str]:
    """Engines make 8-bit floats out of 16 bits at load; other formats need a checkpoint of their own."""
    if precision == shape.weight_format:
        return []
    return ["--quantization fp8"] if precision == "fp8" else [f"  # needs a checkpoint quantised to {precision}"]


def _split_vllm(serve: str, row: Offer) -> str:
    """KV caches travel over NIXL; the proxy comes with vLLM's sources and decides who prefills."""
    command, _, comment = serve.partition("  # ")
    lines = [
        f"VLLM_NIXL_SIDE_CHANNEL_HOST=$(hostname -i) {command} --port {PORTS[role]} --kv-transfer-config "
        f"""'{{"kv_connector":"NixlConnector","kv_role":"{KV_ROLE[role]}"}}'""" + (f"  # {comment}" if comment else "")
        for role in PORTS
    ]
    proxy = ["python tests/v1/kv_connector/nixl_integration/toy_proxy_server.py --port 8000"]
    for kind, role in (("prefiller", "prefill"), ("decoder", "decode")):
        hosts = _hosts(role, row)
        proxy += [f"--{kind}-hosts", *hosts, f"--{kind}-ports", *[str(PORTS[role])] * len(hosts)]
    return "\n".join([*lines, " ".join(proxy)])


def _split_sglang(serve: str, row: Offer) -> str:
    command, _, comment = serve.partition("  # ")
    lines = [
        f"{command} --disaggregation-mode {role} --disaggregation-transfer-backend nixl --host 0.0.0.0 "
        f"--port {PORTS[role]}" + (f"  # {comment}" if comment else "")
        for role in PORTS
    ]
    workers = " ".join(f"--{role} http://{host}:{PORTS[role]}" for role in PORTS for host in _hosts(role, row))
    router = f"python -m sglang_router.launch_router --pd-disaggregation {workers} --host 0.0.0.0 --port 8000"
    return "\n".join([*lines, router])


def _hosts(role: str, row: Offer) -> list[str]:
    replicas = row.prefill_replicas if role == "prefill" else row.replicas
    return [f"{role}-{number}" for number in range(1, replicas + 1)]
