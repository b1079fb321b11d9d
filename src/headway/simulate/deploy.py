"""What is simulated: a model on devices, its step time, its memory plan, and how its scheduler is set up."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Annotated

import msgspec

from headway.core.clock import MAX_SECONDS, VirtualClock, to_ps
from headway.core.errors import BadInput
from headway.core.events import EventLog
from headway.core.options import Option, Options, declared
from headway.core.step import Capabilities
from headway.engine.options import MAX_STEP, EngineOptions
from headway.engine.warmup import usual_budget
from headway.executor.simulated import SimulatedRanks
from headway.roofline.calibrate import calibration
from headway.roofline.deployment import Deployment
from headway.roofline.hardware import GIB, Hardware
from headway.roofline.memory import MemoryPlan, cut_pools, replica_memory
from headway.roofline.noise import StepNoise
from headway.roofline.profile import Profile
from headway.roofline.replica import Replica, deploy
from headway.roofline.step import StepTime, check_layout, decode_step
from headway.roofline.timing import Timing, steps_here
from headway.roofline.work import Layout
from headway.scheduling.budget import Budget, StepTimeModel
from headway.scheduling.policies import policy_named
from headway.scheduling.scheduler import Scheduler
from headway.shape.model import ModelShape, block_bytes
from headway.simulate.driver import SimulatedReplica
from headway.simulate.workload import Answers

MEMORIES = ("paged", "contiguous")
MOST = 1e9  # seconds, GiB, dollars: whatever is asked for
ENGINE = "vllm"  # whose fitted constants stand for an engine on a GPU
GPU_ROWS, GPU_TOKENS = 256, 2048  # of a step, vLLM's defaults
OURS = EngineOptions()  # the defaults of our own
_OF_ENGINE = declared(EngineOptions)


class EngineSetup(Options, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a replica's scheduler and cache are set up; None = as is usual for the device. What an engine has too means
    the same here.

    Raises:
        BadInput: a value is not one that its option accepts.
    """

    policy: Annotated[str, _OF_ENGINE["policy"]] = OURS.policy
    max_rows: Annotated[int | None, Option("Most requests in one step.", least=1, most=MAX_STEP)] = None
    max_step_tokens: Annotated[int | None, Option("Most new tokens in one step.", least=1, most=MAX_STEP)] = None
    step_ms: Annotated[
        float | None, Option("Longest step in ms that a prompt chunk may cause.", above=0, most=MOST)
    ] = None
    max_model_len: Annotated[int | None, Option("Longest context.", least=1, most=1 << 24)] = None
    memory: Annotated[
        str, Option("paged, or contiguous: every request reserves the longest context from its start.", MEMORIES)
    ] = "paged"
    block_size: Annotated[int, Option("Tokens per cache block.", least=1, most=MAX_STEP)] = OURS.block_size
    kv_cache_gib: Annotated[
        float | None, Option("GiB for the KV cache of each device; default: all that is free.", above=0, most=MOST)
    ] = None
    prefix_cache: Annotated[bool, Option("Keep finished prefixes.", panel="Prefix cache")] = True
    prefix_ttl: Annotated[float, _OF_ENGINE["prefix_ttl"]] = OURS.prefix_ttl
    max_wait: Annotated[
        float | None, Option("Most seconds a request waits for its turn.", above=0, most=MAX_SECONDS)
    ] = None
    ttft_target: Annotated[float | None, _OF_ENGINE["ttft_target"]] = None
    noise: Annotated[
        bool, Option("Steps vary as those did that `headway calibrate` fitted; what is published has no noise.")
    ] = True
    host_us: Annotated[float, Option("Microseconds per step outside of the step-time model.", least=0, most=MOST)] = 0.0

    @classmethod
    def about(cls) -> str:
        return "a simulated replica"


class Deployed(msgspec.Struct, frozen=True):
    """A replica ready to be simulated.

    Attributes:
        priced: model, precision, devices. model: seconds of its steps; label: what these rest on.
        memory: of one device. limits: what the executor pretends to hold. budget: of a step.
        price: dollars per device and hour; None = not known.
        noise: how single steps vary, as `roofline.profile.Fit` keeps it; empty = not at all. seed: of its draw.
    """

    priced: Replica
    setup: EngineSetup
    model: StepTime
    label: str
    memory: MemoryPlan
    limits: Capabilities
    budget: Budget
    price: float | None = None
    noise: Mapping[str, Sequence[int]] = {}
    seed: int = 0

    @property
    def host_seconds(self) -> float:
        """Per step, outside of the step-time model."""
        return self.setup.host_us * 1e-6

    def replica(
        self, answers: Answers, log: EventLog | None = None, leaps: bool = True, number: int = 0,
        truth: StepTimeModel | None = None,
    ) -> SimulatedReplica:  # fmt: skip
        """A fresh one, with an empty cache. `leaps`: over equal steps, which changes nothing but the time it takes.
        `number`: replicas of other numbers have noise of their own. `truth`: what its steps really take, where that
        is not what its scheduler believes."""
        clock, policy = VirtualClock(), policy_named(self.setup.policy)
        sized = self.budget.milliseconds is not None or policy.predicts
        target = self.setup.ttft_target
        scheduler = Scheduler(
            self.limits, key=b"", policy=policy, budget=self.budget, model=self.model if sized else None, log=log,
            ttl=to_ps(self.setup.prefix_ttl), ttft=None if target is None else to_ps(target),
            max_wait=self.setup.max_wait, reuse=self.setup.prefix_cache,
        )  # fmt: skip
        noise = StepNoise(self.noise, (self.seed << 32) + number) if self.noise else None
        executor = SimulatedRanks(self.limits, clock, truth or self.model, answers, host=self.host_seconds, noise=noise)
        return SimulatedReplica([scheduler], executor, clock, answers, leaps=leaps)


def deployed(
    shape: ModelShape, device: Hardware, gpus: int, setup: EngineSetup, *, precision: str | None = None,
    kv: str | None = None, profile: Profile | None = None, price: float | None = None,
) -> Deployed:  # fmt: skip
    """Plan the memory and price the steps of a replica.

    Args:
        profile: of the machine, where `device` is one that was measured.
        price: dollars per device and hour; None = the catalogue's.

    Raises:
        BadInput: it does not fit, or cannot be split so.
    """
    check_layout(shape, Layout(gpus), field="--tp")
    if price is not None and not 0 < price <= MOST:
        raise BadInput("--price", f"{price:g} is not a number above 0 and up to {MOST:g}")
    priced = deploy(shape, device, gpus, precision=precision, kv=kv, mode=Replica)
    timing = _timing(priced, profile, setup.noise)
    cpu = device.kind == "cpu"
    rows = setup.max_rows or (OURS.max_rows if cpu else GPU_ROWS)
    tokens = max(rows, setup.max_step_tokens or (OURS.max_step_tokens if cpu else GPU_TOKENS))
    longest = setup.max_model_len or shape.context or 4096
    memory = _memory(priced, setup, rows, tokens, longest)
    size, blocks = memory.block_size, memory.blocks
    limits = Capabilities(
        block_size=size, blocks=blocks, windows=tuple(group.window for group in priced.shape.groups), max_rows=rows,
        max_tokens_per_step=tokens, max_model_len=min(longest, memory.longest),
    )  # fmt: skip
    budget = Budget(tokens=tokens, milliseconds=setup.step_ms)
    if setup.step_ms is None and cpu:
        budget = usual_budget(tokens, 1e3 * timing.model.predict(decode_step(priced.shape, 1, 1)))
    if budget.milliseconds is not None and not timing.noise:  # else the scheduler learns what they miss
        budget = msgspec.structs.replace(budget, milliseconds=budget.milliseconds / timing.high)
    hourly = device.price[basis].typical if price is None and (basis := device.basis()) else price
    return Deployed(priced, setup, timing.model, _label(timing), memory, limits, budget, hourly, timing.noise)


def _memory(priced: Replica, setup: EngineSetup, rows: int, tokens: int, longest: int) -> MemoryPlan:
    """The plan of one device, its cache cut into pools."""
    shape = priced.shape
    plan = replica_memory(shape, priced.hardware, priced.layout, tokens)
    size = setup.block_size if setup.memory == "paged" else longest
    each = [block_bytes(group, size, priced.gpus) for group in shape.groups]
    wanted = setup.kv_cache_gib
    if wanted is None and priced.hardware.kind != "cpu":  # a GPU is all the engine's
        wanted = plan.room / GIB
        if wanted <= 0:
            raise BadInput("--hardware", f"{shape.name} does not fit: {plan.spent()}; more GPUs (--tp) share it")
    return cut_pools(
        plan, shape.groups, each, block_size=size, max_rows=rows, max_len=longest, step_tokens=tokens,
        kv_cache_gib=wanted, least_windows=priced.hardware.kind != "cpu",
    )  # fmt: skip


def _timing(priced: Replica, profile: Profile | None, noise: bool) -> Timing:
    """Fitted to this machine's own steps, or to public runs of an engine; else a bound. Without noise steps take what
    they do in the mean, with it what is usual."""
    shape, device = priced.shape, priced.hardware
    if profile is not None:
        timing = steps_here(shape, profile, priced.step_time())
        return timing if noise and timing.noise else timing.of_many
    if device.kind != "gpu":
        return Timing.bound(priced.step_time(), f"no engine's steps are known on {device.name}")
    served = Deployment(
        shape, device, ENGINE, concurrency=64.0, prompt=1024.0, output=256.0, precision=_precision(priced),
        cache_bytes=shape.kv_width or 2.0, gpus=priced.gpus,
    )  # fmt: skip
    known = calibration()
    efficiency, reduce = known.constants(served)
    outside = known.outside(served)
    model = priced.step_time(efficiency, reduce if priced.gpus > 1 else None)
    return Timing(model, "estimate", 1.0, 1.0, outside)


def _label(timing: Timing) -> str:
    """What the seconds rest on."""
    if timing.label == "bound" or timing.high > timing.low:
        return timing.text()
    doubt = f"; not validated: {timing.reason}" if timing.reason else ""
    return f"estimate: constants fitted on public runs of {ENGINE}{doubt}"


def _precision(priced: Replica) -> str:
    """As the calibration names it."""
    names: dict[str, Callable[[float], bool]] = {
        "bf16": lambda width: width >= 1.5, "fp8": lambda width: width >= 0.75, "fp4": lambda width: True,
    }  # fmt: skip
    return next(name for name, of in names.items() if of(priced.weight_width))
