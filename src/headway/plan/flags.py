"""The command lines that run a planned deployment: vLLM's and SGLang's, or TensorRT-LLM's; on a CPU Headway's own."""

from __future__ import annotations

import shlex
from math import ceil

from headway.plan.answers_lists import Offer, Workers
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
    here = Workers(row.hardware, row.gpus, row.attention_dp, row.expert_parallel, row.pipeline, row.nodes)
    vllm = _vllm(name, shape, row, kv, here)
    sglang = _sglang(name, shape, row, kv, here)
    if row.prefill is not None:
        first = row.prefill
        return {
            "vllm": _split_vllm({"prefill": _vllm(name, shape, row, kv, first), "decode": vllm}, row),
            "sglang": _split_sglang({"prefill": _sglang(name, shape, row, kv, first), "decode": sglang}, row),
        }
    if row.hardware_kind != "cpu":  # `headway serve` computes on the CPU alone
        return {"vllm": vllm, "sglang": sglang}
    headway = (
        f"headway serve {name} --max-rows {row.rows} --max-step-tokens {row.chunk} "
        f"--max-model-len {row.max_model_len} --step-ms {max(1, round(row.tpot_ms))}"
    )
    return {"headway": headway, "vllm": vllm, "sglang": sglang}


def _vllm(name: str, shape: ModelShape, row: Offer, kv: str | None, way: Workers) -> str:
    """vLLM counts sequences, a step's tokens and tensor-parallel GPUs per data-parallel rank. Replicas of several nodes
    are started on each, with its own NODE_RANK and the first one's address in HEAD."""
    ranks, each = way.attention_dp, way.attention_dp // way.nodes
    nodes = [f"--nnodes {way.nodes}", "--node-rank $NODE_RANK", "--master-addr $HEAD"] if way.nodes > 1 else []
    if way.nodes > 1 and ranks > 1:
        nodes = [f"--data-parallel-size-local {each}", "--data-parallel-address $HEAD",
                 f"--data-parallel-start-rank $((NODE_RANK * {each}))", "--data-parallel-hybrid-lb"]  # fmt: skip
    return " ".join([
        f"vllm serve {name}", f"--tensor-parallel-size {way.gpus // way.pipeline // ranks}",
        *([f"--pipeline-parallel-size {way.pipeline}"] if way.pipeline > 1 else []),
        *([f"--data-parallel-size {ranks}"] if ranks > 1 else []),
        *(["--enable-expert-parallel"] if way.expert_parallel > 1 else []), *nodes,
        f"--max-num-seqs {ceil(row.rows / ranks)}",
        f"--max-num-batched-tokens {ceil(max(row.chunk, row.rows) / ranks)}", f"--max-model-len {row.max_model_len}",
        f"--gpu-memory-utilization {UTILISATION}", "--enable-prefix-caching",
        *(["--kv-cache-dtype fp8"] if kv == "fp8" else []), *_requantised(shape, row.precision),
    ])  # fmt: skip


def _sglang(name: str, shape: ModelShape, row: Offer, kv: str | None, way: Workers) -> str:
    """SGLang counts sequences and GPUs of the whole replica, a stage's in --tp."""
    ranks = way.attention_dp
    nodes = [f"--nnodes {way.nodes}", "--node-rank $NODE_RANK", "--dist-init-addr $HEAD:20000"]
    return " ".join([
        f"python -m sglang.launch_server --model-path {name}", f"--tp {way.gpus // way.pipeline}",
        *([f"--pp-size {way.pipeline}"] if way.pipeline > 1 else []),
        *(["--enable-dp-attention", f"--dp {ranks}"] if ranks > 1 else []),
        *([f"--ep-size {way.expert_parallel}"] if way.expert_parallel > 1 else []),
        *(nodes if way.nodes > 1 else []),
        f"--max-running-requests {row.rows}", f"--chunked-prefill-size {row.chunk}",
        f"--context-length {row.max_model_len}", "--mem-fraction-static 0.88",
        *(["--kv-cache-dtype fp8_e4m3"] if kv == "fp8" else []), *_requantised(shape, row.precision),
    ])  # fmt: skip


def _trtllm(name: str, shape: ModelShape, row: Offer, kv: str | None) -> str:
    """TensorRT-LLM counts sequences per data-parallel rank, and reads the rest from a file of settings. A step's tokens
    it counts per rank too, but they are not divided here: without chunked context a prompt has to fit into one step of
    its rank whole."""
    ranks = row.attention_dp
    pools = {"decode": Workers(row.hardware, row.gpus, ranks, row.expert_parallel, row.pipeline, row.nodes)}
    if row.prefill is not None:
        pools = {"prefill": row.prefill} | pools
    settings = [
        *(["enable_attention_dp: true"] if ranks > 1 else []),
        "kv_cache_config:", f"  free_gpu_memory_fraction: {UTILISATION}", *(["  dtype: fp8"] if kv == "fp8" else []),
        *(["cache_transceiver_config:", "  backend: DEFAULT"] if row.prefill_replicas else []),
    ]  # fmt: skip
    comment = "" if row.precision == shape.weight_format else f"  # needs a checkpoint quantised to {row.precision}"

    def serve(way: Workers) -> str:
        launch = f"mpirun -n {way.gpus} trtllm-llmapi-launch " if way.nodes > 1 else ""
        return " ".join([
            f"{launch}trtllm-serve {name} --backend pytorch", f"--tp_size {way.gpus // way.pipeline}",
            *([f"--pp_size {way.pipeline}"] if way.pipeline > 1 else []),
            *([f"--ep_size {way.expert_parallel}"] if way.expert_parallel > 1 else []),
            f"--max_batch_size {ceil(row.rows / way.attention_dp)}",
            f"--max_num_tokens {max(row.chunk, row.rows)}", f"--max_seq_len {row.max_model_len}",
            "--extra_llm_api_options settings.yaml",
        ])  # fmt: skip

    written = ["cat > settings.yaml <<END", *settings, "END"]
    if not row.prefill_replicas:
        return "\n".join([*written, serve(pools["decode"]) + comment])
    workers = [f"{serve(pools[role])} --host 0.0.0.0 --port {port}{comment}" for role, port in PORTS.items()]
    listed = ["hostname: 0.0.0.0", "port: 8000"]
    for title, role in (("context_servers", "prefill"), ("generation_servers", "decode")):
        hosts = _hosts(role, row)
        listed += [f"{title}:", f"  num_instances: {len(hosts)}", "  urls:"]
        listed += [f'    - "{host}:{PORTS[role]}"' for host in hosts]
    router = ["cat > pools.yaml <<END", *listed, "END", "trtllm-serve disaggregated -c pools.yaml"]
    return "\n".join([*written, *workers, *router])


def _requantised(shape: ModelShape, precision: str) -> list[str]:
    """Engines make 8-bit floats out of 16 bits at load; other formats need a checkpoint of their own."""
    if precision == shape.weight_format:
        return []
    return ["--quantization fp8"] if precision == "fp8" else [f"  # needs a checkpoint quantised to {precision}"]


def _split_vllm(serve: dict[str, str], row: Offer) -> str:
    """KV caches travel over NIXL; the proxy comes with vLLM's sources and decides who prefills."""
    lines = [
        f"VLLM_NIXL_SIDE_CHANNEL_HOST=$(hostname -i) {command} --port {PORTS[role]} --kv-transfer-config "
        f"""'{{"kv_connector":"NixlConnector","kv_role":"{KV_ROLE[role]}"}}'""" + (f"  # {comment}" if comment else "")
        for role in PORTS
        for command, _, comment in [serve[role].partition("  # ")]
    ]
    proxy = ["python tests/v1/kv_connector/nixl_integration/toy_proxy_server.py --port 8000"]
    for kind, role in (("prefiller", "prefill"), ("decoder", "decode")):
        hosts = _hosts(role, row)
        proxy += [f"--{kind}-hosts", *hosts, f"--{kind}-ports", *[str(PORTS[role])] * len(hosts)]
    return "\n".join([*lines, " ".join(proxy)])


def _split_sglang(serve: dict[str, str], row: Offer) -> str:
    lines = [
        f"{command} --disaggregation-mode {role} --disaggregation-transfer-backend nixl --host 0.0.0.0 "
        f"--port {PORTS[role]}" + (f"  # {comment}" if comment else "")
        for role in PORTS
        for command, _, comment in [serve[role].partition("  # ")]
    ]
    workers = " ".join(f"--{role} http://{host}:{PORTS[role]}" for role in PORTS for host in _hosts(role, row))
    router = f"python -m sglang_router.launch_router --pd-disaggregation {workers} --host 0.0.0.0 --port 8000"
    return "\n".join([*lines, router])


def _hosts(role: str, row: Offer) -> list[str]:
    replicas = row.prefill_replicas if role == "prefill" else row.replicas
    return [f"{role}-{number}" for number in range(1, replicas + 1)]
