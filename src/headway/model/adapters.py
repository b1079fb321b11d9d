"""Where adapters meet a model: its linear layers by the names that adapters use, and the slots behind them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from headway.core.errors import BadInput, ModelFileError, shown
from headway.model.adapter_file import AdapterFile
from headway.model.family import Decoder
from headway.ops.adapter import Adapted, adapted, linear_layers
from headway.ops.protocol import AdapterSlots, Backend, Forward, Prepared
from headway.ops.weight import Weight

_MATRIX = ".weight"


@dataclass(frozen=True)
class AdapterLimits:
    """How many adapters may be loaded at once, and their largest rank."""

    count: int
    most_rank: int


@dataclass(frozen=True)
class LinearLayer:
    """A linear layer.

    Attributes:
        shape: (out, in).
        slots: for what adapters add to it.
        rows: which rows of its tensor, as the model's file has it, are its own.
        order: where its file keeps rows in another order than folders do: the row of a folder that each one is.
    """

    shape: tuple[int, int]
    slots: AdapterSlots
    rows: np.ndarray
    order: np.ndarray | None = None

    def own(self, up: Weight, gguf: bool) -> Weight:
        """Its rows of an adapter's matrix [out of the whole tensor, rank]. gguf: the adapter is in the file's order."""
        rows = self.rows if gguf or self.order is None else self.rows[self.order]
        data = np.ascontiguousarray(up.data.reshape(up.shape[0], -1)[rows]).reshape(-1)
        return replace(up, shape=(self.shape[0], up.shape[1]), data=data, origin=None)


@dataclass(frozen=True)
class Addition:
    """What an adapter adds to a layer, prepared."""

    slots: AdapterSlots
    down: Prepared
    up: Prepared
    scale: float


class Adaptable:
    """A prepared model's linear layers, for adapters.

    Args:
        backend: holds the model.
        layers: by the name of the tensor in a Hugging Face folder, and by that in a GGUF; several where a tensor is cut
            into the matrices of several layers, in the order of its rows.
        gguf: the model comes from a GGUF file.
        limits: how much room there is.

    Attributes:
        bytes: that all slots take when they are filled with adapters of the largest rank, and one more that is to
            replace another.
    """

    def __init__(
        self,
        backend: Backend,
        layers: tuple[Mapping[str, Sequence[LinearLayer]], Mapping[str, Sequence[LinearLayer]]],
        gguf: bool,
        limits: AdapterLimits,
    ) -> None:
        self._backend = backend
        self._by_module, self._by_tensor = layers
        self._gguf = gguf
        self.limits = limits
        shapes = [layer.shape for pieces in self._by_module.values() for layer in pieces]
        self.bytes = (limits.count + 1) * sum(backend.low_rank_bytes(shape, limits.most_rank) for shape in shapes)

    def names(self, gguf: bool = False) -> list[str]:
        """Of all layers, as adapters of either kind call them."""
        return [name.removesuffix(_MATRIX) for name in (self._by_tensor if gguf else self._by_module)]

    def check(self, file: AdapterFile) -> None:
        """
        Raises:
            ModelFileError: it adds to what is no linear layer of this model, or is of other shapes.
            BadInput: its rank is larger than was provided for.
        """
        if file.gguf and not self._gguf:
            raise ModelFileError(f"{file.path}: a GGUF adapter fits a GGUF model only; give the folder that PEFT saved")
        for name, pair in file.pairs.items():
            layers = self._layers(file, name)
            if not layers:
                known = sorted({layer.rpartition(".")[2] for layer in self.names(file.gguf)})
                problem = f"is no linear layer of this model; adapters may add to {', '.join(known)}"
                raise ModelFileError(f"{file.path}: {shown(name)} {problem}")
            wanted = sum(layer.shape[0] for layer in layers), layers[0].shape[1]
            if (pair.up.shape[0], pair.down.shape[1]) != wanted:
                shapes = f"{pair.up.shape} times {pair.down.shape}"
                raise ModelFileError(f"{file.path}: {shown(name)}: {shapes} does not fit the model's matrix {wanted}")
        if file.rank > self.limits.most_rank:
            problem = f"{file.path} has rank {file.rank}, and room was made for {self.limits.most_rank}"
            raise BadInput("--max-lora-rank", problem)

    def prepare(self, file: AdapterFile) -> list[Addition]:
        """A checked adapter's matrices on the backend.

        Raises:
            ModelFileError: one is broken.
        """
        ready = []
        for name, pair in file.pairs.items():
            down = self._backend.prepare_low_rank(pair.down)
            for layer in self._layers(file, name):
                up = self._backend.prepare_low_rank(layer.own(pair.up, file.gguf))
                ready.append(Addition(layer.slots, down, up, pair.scale))
            for weight in (pair.down, pair.up):
                for origin in weight.origins:
                    origin.forget()
        return ready

    def put(self, number: int, additions: Sequence[Addition]) -> None:
        """Load an adapter as this number, in place of what was there."""
        self.clear(number)
        for one in additions:
            one.slots.put(number, one.down, one.up, one.scale)

    def clear(self, number: int) -> None:
        """Forget an adapter."""
        for layers in self._by_module.values():
            for layer in layers:
                layer.slots.clear(number)

    def _named(self, file: AdapterFile) -> Mapping[str, Sequence[LinearLayer]]:
        return self._by_tensor if file.gguf else self._by_module

    def _layers(self, file: AdapterFile, name: str) -> Sequence[LinearLayer]:
        return self._named(file).get(name if file.gguf else name + _MATRIX, ())


def make_adaptable(
    backend: Backend, decoder: Decoder, prepared: Mapping[str, Prepared], limits: AdapterLimits
) -> tuple[Forward, Adaptable]:
    """The forward pass of a prepared decoder that adds what adapters say, and where these are loaded."""
    reached = {id(weight) for weight in linear_layers(decoder.build(prepared))}
    weights, layers = dict(prepared), (dict[str, list[LinearLayer]](), dict[str, list[LinearLayer]]())
    for role, spec in decoder.specs.items():
        if id(prepared[role]) not in reached or decoder.parts[role] in ("embed", "head"):
            continue
        out, inputs = decoder.weights[role].shape
        slots = backend.adapter_slots((out, inputs), limits.count, limits.most_rank)
        weights[role] = Adapted(prepared[role], slots)
        layer = LinearLayer((out, inputs), slots, _rows(decoder, role), _order(decoder, role))
        layers[0].setdefault(spec.hf, []).append(layer)
        layers[1].setdefault(spec.gguf, []).append(layer)
    return adapted(decoder.build(weights)), Adaptable(backend, layers, decoder.gguf, limits)


def _rows(decoder: Decoder, role: str) -> np.ndarray:
    """Which rows of its tensor a layer consists of: those that `TensorSpec.cut` takes of their numbers."""
    spec = decoder.specs[role]
    total = sum(decoder.weights[other].shape[0] for other, its in decoder.specs.items() if its is spec)
    numbers = np.arange(total, dtype=np.float32)
    if spec.cut is None or total == decoder.weights[role].shape[0]:
        return np.arange(total)
    upright = spec.shape[0] == total
    tensor = Weight("rows", (total, 1) if upright else (1, total), "f32", numbers.view(np.uint8))
    piece = spec.cut(tensor, decoder.config)[role.partition(".")[2] or role]
    return piece.flat().view(np.float32).astype(np.int64)


def _order(decoder: Decoder, role: str) -> np.ndarray | None:
    """Of queries and keys in the GGUF files of some families, which lie in rotary pairs."""
    heads = {"q": decoder.config.heads, "k": decoder.config.kv_heads}.get(role.rpartition(".")[2])
    if heads is None or not decoder.config.permuted:
        return None
    rows = np.arange(decoder.weights[role].shape[0])
    return rows.reshape(heads, 2, -1).swapaxes(1, 2).reshape(-1)
