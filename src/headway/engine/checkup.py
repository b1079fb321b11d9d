"""What `headway doctor` says: the machine as this process sees it, measured, and what a model should do on it."""

from __future__ import annotations

import msgspec

from headway.core.errors import BadInput
from headway.engine.build import make_backend
from headway.engine.machine import free_memory, isa, usable_cores
from headway.engine.memory import GIB
from headway.engine.profile import measure_machine, step_time
from headway.model.load import load
from headway.model.source import DEFAULT_MODEL
from headway.roofline.shape import kv_bytes
from headway.roofline.step import decode_step, prefill_step

BATCHES = (1, 8, 32)
PROMPT = 512


class Prediction(msgspec.Struct, frozen=True):
    """A bound: no step can be faster than memory and arithmetic allow.

    Attributes:
        batch: requests decoding together, each `context` tokens long.
        tokens_per_second: over all of them.
        binds: "memory" or "compute".
    """

    batch: int
    tokens_per_second: float
    binds: str

    def text(self, context: int) -> str:
        return f"at most {self.tokens_per_second:.0f} tokens/s at context {context} (a bound; {self.binds} binds)"


class Checkup(msgspec.Struct, frozen=True):
    """The machine and a model on it. Rates in bytes/s and FLOP/s."""

    isa: list[str]
    threads: int
    free_memory: int
    read_bandwidth: dict[str, float]
    rates: dict[str, float]
    backend: str
    model: str
    weight_bytes: int
    kv_bytes_per_token: float
    context: int
    decode: list[Prediction]
    prefill_tokens_per_second: float

    def lines(self) -> list[tuple[str, str]]:
        """(label, text) pairs to print."""
        bandwidth = ", ".join(f"{rate / 1e9:.1f} GB/s on {n}" for n, rate in self.read_bandwidth.items())
        rates = ", ".join(f"{name} {rate / 1e9:.0f} GFLOP/s" for name, rate in self.rates.items())
        return [
            ("instruction sets", " ".join(self.isa)),
            ("threads", f"{self.threads} (affinity and container quota considered)"),
            ("free memory", f"{self.free_memory / GIB:.1f} GiB"),
            ("read bandwidth", f"{bandwidth} threads"),
            ("arithmetic", rates),
            ("model", f"{self.model} on the {self.backend} backend"),
            ("weights", f"{self.weight_bytes / GIB:.2f} GiB, cache {self.kv_bytes_per_token / 1024:.1f} KiB per token"),
            *((f"decode, batch {one.batch}", one.text(self.context)) for one in self.decode),
            (f"prefill of {PROMPT}", f"at most {self.prefill_tokens_per_second:.0f} tokens/s (a bound)"),
        ]


def checkup(model: str | None, context: int, threads: int | None, backend: str) -> Checkup:
    """Measure the machine, load the model, and predict.

    Raises:
        BadInput: an argument is out of range.
    """
    for flag, value in (("--context", context), ("--threads", threads)):
        if value is not None and value < 1:
            raise BadInput(flag, f"{value} is not an integer >= 1")
    cores = threads or usable_cores()
    free = free_memory()
    device = make_backend(backend, cores)
    loaded = load(DEFAULT_MODEL if model is None else model, device, room=free)
    profile = measure_machine(cores)
    time = step_time(loaded.shape, profile, device.math)
    decode = []
    for batch in BATCHES:
        cost = time.explain(decode_step(loaded.shape, batch, context))
        decode.append(Prediction(batch, batch / cost.seconds, cost.binds))
    return Checkup(
        isa=isa(),
        threads=cores,
        free_memory=free,
        read_bandwidth=profile.read_bandwidth,
        rates=profile.rates,
        backend=device.name,
        model=loaded.info.name,
        weight_bytes=device.weight_bytes,
        kv_bytes_per_token=kv_bytes(loaded.groups, 1),
        context=context,
        decode=decode,
        prefill_tokens_per_second=PROMPT / time.predict(prefill_step(loaded.shape, PROMPT)),
    )
