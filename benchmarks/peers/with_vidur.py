"""Vidur's own simulator over a trace, for `simulators.py`: run it in an environment that has `pip install vidur`.

    python with_vidur.py REQUESTS.json     -> one JSON object: seconds, and mean latencies

Its wheel has neither profiles of devices nor traces, so a step takes what the file says: step + row * rows +
token * new tokens + kv_token * cached tokens, seconds. Scheduling ('sarathi': chunked prefill) and events are Vidur's.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

os.environ["WANDB_MODE"] = "disabled"


def main() -> None:
    asked = json.loads(Path(sys.argv[1]).read_text())
    os.chdir(tempfile.mkdtemp())
    from vidur import config as vidur
    from vidur._native.entities import ExecutionTime
    from vidur.entities import Request
    from vidur.execution_time_predictor import ExecutionTimePredictorRegistry
    from vidur.request_generator import RequestGeneratorRegistry
    from vidur.simulator import Simulator

    costs = asked["costs"]
    made: list[Request] = []

    def seconds(batch: Any, stage: int) -> ExecutionTime:
        took = (
            costs["step"] + costs["row"] * len(batch.requests) + costs["token"] * batch.total_num_q_tokens
            + costs["kv_token"] * (batch.total_num_kv_tokens + batch.total_num_q_tokens)
        )  # fmt: skip
        return ExecutionTime(1, *[1e3 * took if index == 7 else 0.0 for index in range(14)])

    def requests() -> list[Request]:
        made.extend(Request(arrived_at=at, num_prefill_tokens=p, num_decode_tokens=d) for at, p, d in asked["requests"])
        return made

    ExecutionTimePredictorRegistry.get = classmethod(lambda *a, **k: SimpleNamespace(get_execution_time=seconds))
    RequestGeneratorRegistry.get = classmethod(lambda *a, **k: SimpleNamespace(generate=requests))
    longest = max(p + d for _, p, d in asked["requests"])
    simulation = vidur.SimulationConfig(
        request_generator_config=vidur.SyntheticRequestGeneratorConfig(
            length_generator_config=vidur.FixedRequestLengthGeneratorConfig(max_tokens=longest)
        ),
        cluster_config=vidur.ClusterConfig(
            replica_config=vidur.ReplicaConfig(num_pipeline_stages=1, tensor_parallel_size=1),
            cache_config=vidur.CacheConfig(num_blocks=asked["blocks"], block_size=asked["block_size"]),
            replica_scheduler_config=vidur.SarathiSchedulerConfig(
                chunk_size=asked["step_tokens"], batch_size_cap=asked["rows"]
            ),
        ),
        metrics_config=vidur.MetricsConfig(
            write_metrics=False, enable_chrome_trace=False, store_plots=False, store_utilization_metrics=False,
        ),
    )  # fmt: skip
    begin, cpu = time.perf_counter(), time.process_time()
    Simulator(simulation).run()
    took = {"cpu": time.process_time() - cpu, "wall": time.perf_counter() - begin}
    ttft = [one.prefill_completed_at - one.arrived_at for one in made]
    e2e = [one.completed_at - one.arrived_at for one in made]
    print(json.dumps(took | {"ttft": sum(ttft) / len(ttft), "e2e": sum(e2e) / len(e2e)}))


if __name__ == "__main__":
    main()
