"""A measured run of vLLM, as a folder: meta.json, config.json, requests.jsonl, timeseries.csv.

`requests.jsonl` has, per request, lengths and the moments at which the engine took it from its socket (`queued_ts`),
first scheduled it, and had its first and last token, all on the engine's own clock; `arrival_time` is the front end's.
"""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import msgspec

from headway.core.errors import BadInput
from headway.core.step import Capabilities
from headway.roofline.deployment import Deployment
from headway.roofline.hardware import GIB, Hardware, find_hardware, hardware_catalogue
from headway.roofline.memory import RUNTIME, MemoryPlan, activation_bytes, weights_per_gpu
from headway.shape.model import ModelShape, kv_bytes
from headway.simulate.deploy import GPU_ROWS, GPU_TOKENS

UTILISATION = 0.9  # of the device's memory, vLLM's default
BLOCK = 16  # tokens, its default
FILES = ("meta.json", "config.json", "requests.jsonl", "timeseries.csv")
LARGEST = 1 << 28  # bytes of a file


class MeasuredRequest(msgspec.Struct):
    """A line of requests.jsonl; seconds."""

    request_id: str
    input_toks: int
    output_toks: int
    arrival_time: float
    queued_ts: float
    scheduled_ts: float
    first_token_ts: float
    last_token_ts: float

    @property
    def ttft(self) -> float:
        return self.first_token_ts - self.queued_ts

    @property
    def tpot(self) -> float | None:
        if self.output_toks < 2:
            return None
        return (self.last_token_ts - self.first_token_ts) / (self.output_toks - 1)

    @property
    def e2e(self) -> float:
        return self.last_token_ts - self.queued_ts


class Second(msgspec.Struct):
    """A line of timeseries.csv: requests running and waiting, `t` seconds after the start."""

    t: float
    running: float
    waiting: float


class Measured(msgspec.Struct):
    """A run.

    Attributes:
        name: of its folder.
        requests: by arrival.
        seconds: the engine's state over time.
        model: name of the model. deployment: what served it, per replica.
        replicas: engines that share nothing but the front end's queue.
        limits: of each rank.
    """

    name: str
    requests: list[MeasuredRequest]
    seconds: list[Second]
    deployment: Deployment
    replicas: int
    limits: Capabilities
    blocks_from: str


class _Instance(msgspec.Struct):
    hardware: str = ""


class _Node(msgspec.Struct):
    instances: list[_Instance] = []


class _Config(msgspec.Struct):
    nodes: list[_Node] = []


class _Engine(msgspec.Struct, frozen=True):
    tensor_parallel_size: int = 1
    data_parallel_size: int = 1
    enable_expert_parallel: bool = False
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    max_model_len: int | None = None


class _Cache(msgspec.Struct, frozen=True):
    num_gpu_blocks: int | None = None
    block_size: int | None = None
    gpu_memory_utilization: float | None = None


class _Device(msgspec.Struct):
    device_name: str = ""
    device_total_memory_bytes: float | None = None


class _Meta(msgspec.Struct):
    model: str
    vllm_version: str = ""
    engine_kwargs: _Engine = _Engine()
    kv_cache: _Cache | None = None
    hardware: _Device | None = None


def model_named(folder: Path) -> str:
    """The model that was served."""
    return _read(folder, "meta.json", _Meta).model


def read_measured(folder: Path, shape: ModelShape) -> Measured:
    """The run in `folder`, of a model of this shape.

    Raises:
        BadInput: a file is missing or is not what it should be, or the device is not in the catalogue.
    """
    meta, config = _read(folder, "meta.json", _Meta), _read(folder, "config.json", _Config)
    requests = sorted(_requests(folder), key=lambda one: one.arrival_time)
    device = _device(folder, meta, config)
    engine = meta.engine_kwargs
    together = shape.is_moe and engine.data_parallel_size > 1  # ranks of a mixture take their steps together
    ranks = engine.data_parallel_size if together else 1
    gpus = engine.tensor_parallel_size * ranks
    mean_in, mean_out = (
        sum(getattr(one, name) for one in requests) / len(requests) for name in ("input_toks", "output_toks")
    )
    deployment = Deployment(
        shape, device, "vllm", concurrency=float(ranks * (engine.max_num_seqs or GPU_ROWS)), prompt=mean_in,
        output=mean_out, version=meta.vllm_version, gpus=gpus, attention_dp=ranks,
        expert_parallel=gpus if engine.enable_expert_parallel else 1,
    )  # fmt: skip
    blocks, source = _blocks(meta, deployment)
    rows = engine.max_num_seqs or GPU_ROWS
    longest = max(one.input_toks + one.output_toks for one in requests)
    limits = Capabilities(
        block_size=(meta.kv_cache.block_size if meta.kv_cache else None) or BLOCK,
        blocks=(blocks,) * len(shape.groups),
        windows=tuple(group.window for group in shape.groups),
        max_rows=rows,
        max_tokens_per_step=max(rows, engine.max_num_batched_tokens or GPU_TOKENS),
        max_model_len=max(engine.max_model_len or 0, longest + 1),
        max_in_flight=2,  # it plans a step while the one before runs ("async scheduling")
    )
    return Measured(
        folder.name, requests, _seconds(folder), deployment,
        engine.data_parallel_size if not together else 1, limits, source,
    )  # fmt: skip


def _blocks(meta: _Meta, deployment: Deployment) -> tuple[int, str]:
    """Cache blocks of one rank, and where the figure is from."""
    cache = meta.kv_cache or _Cache()
    if cache.num_gpu_blocks is not None:
        return cache.num_gpu_blocks, "meta.json"
    device, shape = deployment.hardware, deployment.shape
    total = (meta.hardware.device_total_memory_bytes if meta.hardware else None) or device.visible or device.memory
    engine = meta.engine_kwargs
    plan = MemoryPlan(
        total * (cache.gpu_memory_utilization or UTILISATION),
        weights_per_gpu(shape, deployment.layout),
        activation_bytes(shape, engine.max_num_batched_tokens or GPU_TOKENS, deployment.attention_tp),
        RUNTIME,
    )
    blocks = plan.sequences(kv_bytes(shape, cache.block_size or BLOCK, deployment.attention_tp))
    if blocks < 2:
        raise BadInput("DIR", f"{shape.name} leaves {plan.room / GIB:.1f} GiB for the cache on {device.name}")
    return blocks, "the memory plan"


def _device(folder: Path, meta: _Meta, config: _Config) -> Hardware:
    names = [instance.hardware for node in config.nodes for instance in node.instances if instance.hardware]
    if names:
        return find_hardware(names[0], str(folder / "config.json"))
    full = (meta.hardware.device_name if meta.hardware else "").lower().replace(" ", "-")
    for device in hardware_catalogue().values():
        if any(name in full for name in (device.name, *device.aliases)):
            return device
    raise BadInput(str(folder), "neither config.json nor meta.json names a device of the catalogue")


def _read(folder: Path, name: str, kind: type[Any]) -> Any:
    try:
        return msgspec.json.decode(_bytes(folder, name), type=kind)
    except msgspec.DecodeError as error:
        raise BadInput(str(folder / name), str(error)) from None


def _bytes(folder: Path, name: str) -> bytes:
    path = folder / name
    try:
        if path.stat().st_size > LARGEST:
            raise BadInput(str(path), f"is larger than {LARGEST} bytes")
        return path.read_bytes()
    except OSError as error:
        raise BadInput("DIR", f"{path}: {error.strerror}; a run has {', '.join(FILES)}") from None


def _requests(folder: Path) -> list[MeasuredRequest]:
    decoder, found = msgspec.json.Decoder(MeasuredRequest), []
    for number, line in enumerate(_bytes(folder, "requests.jsonl").splitlines(), 1):
        if not line.strip():
            continue
        try:
            found.append(decoder.decode(line))
        except msgspec.DecodeError as error:
            raise BadInput(str(folder / "requests.jsonl"), f"line {number}: {error}") from None
        if found[-1].input_toks < 1 or found[-1].output_toks < 1:
            raise BadInput(str(folder / "requests.jsonl"), f"line {number}: lengths are numbers from 1")
    if not found:
        raise BadInput(str(folder / "requests.jsonl"), "holds no request")
    return found


def _seconds(folder: Path) -> list[Second]:
    rows = list(csv.DictReader(_bytes(folder, "timeseries.csv").decode(errors="replace").splitlines()))
    try:
        return [Second(float(row["t"]), float(row["running"]), float(row["waiting"])) for row in rows]
    except (KeyError, TypeError, ValueError):
        raise BadInput(str(folder / "timeseries.csv"), "has not the columns t, running, waiting as numbers") from None
