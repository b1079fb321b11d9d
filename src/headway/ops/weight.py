"""A weight as it lies in the checkpoint: name, shape, storage format, raw bytes. Quantisation is a weight type."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from headway.ops.blocks import READERS, dequantise
from headway.shape.formats import FORMATS

READABLE = ("f32", "f16", "bf16", *READERS)  # formats a weight may come in
GROUPS = (16, 32, 64, 128)  # numbers that may share a scale when they are quantised at load
NOT_FINITE = "a weight is infinite or not a number"  # what both backends say of a broken one
_BLOCKS_AT_ONCE = 1 << 14  # dequantised together: temporaries stay in the CPU's cache


class Origin(Protocol):
    """Where in a mapped file a weight's data lie."""

    @property
    def start(self) -> int:
        """Byte of the file."""
        ...

    def fetch(self) -> None:
        """Have the bytes at hand, in one call instead of thousands of page faults while they are read."""
        ...

    def forget(self) -> None:
        """Give the memory of the file's pages back, once the weight is prepared; they can be read again."""
        ...

    def file_identity(self) -> str:
        """The same text for the same file with the same contents, another if it was changed."""
        ...

    def part(self, start: int, size: int) -> Origin:
        """`size` of its bytes, from byte `start` of its own."""
        ...


class Deferred:
    """Bytes that are made of others whenever they are looked at, and not kept: uint8 [nbytes]."""

    def __init__(self, nbytes: int, make: Callable[[], np.ndarray]) -> None:
        self.nbytes = nbytes
        self._make = make

    def reshape(self, *shape: int) -> np.ndarray:
        return self._make().reshape(*shape)

    def view(self, dtype: type) -> np.ndarray:
        return self._make().view(dtype)


@dataclass(frozen=True)
class Weight:
    """A tensor of a checkpoint, still in its stored form (usually a view of the mapped file, so free to hold).

    Attributes:
        name: as in the file; for error messages.
        shape: (out, in) of a matrix, (n,) of a vector, (matrices, out, in) of a stack of matrices that play one role
            together: one per expert, or per head.
        format: one of `READABLE`.
        data: uint8, row-major, rows of a block format one after another; of any shape, and strided where a weight is a
            part of a tensor or its transpose.
        origin: the part of a file that `data` lies in, if it does.
        part: which it plays in a step: "embed", "head", "attention", "mlp", "norm"; "" = not said.
    """

    name: str
    shape: tuple[int, ...]
    format: str
    data: np.ndarray | Deferred
    origin: Origin | None = None
    part: str = ""

    @property
    def bytes(self) -> int:
        """Bytes as stored."""
        return self.data.nbytes

    @property
    def origins(self) -> tuple[Origin, ...]:
        """The parts of files that its data lie in."""
        return () if self.origin is None else (self.origin,)

    def first_rows(self, rows: int) -> Weight:
        """Its first `rows` rows, as a view; itself if it has no more."""
        return self if rows >= self.shape[0] else self.rows(0, rows)

    def rows(self, start: int, stop: int) -> Weight:
        """Rows [start, stop), as a view."""
        size = self.data.nbytes // self.shape[0]
        return replace(
            self,
            name=f"{self.name}[{start}:{stop}]",
            shape=(stop - start, *self.shape[1:]),
            data=self._view(size * (stop - start), lambda: self.data.reshape(self.shape[0], -1)[start:stop]),
            origin=self.origin and self.origin.part(start * size, (stop - start) * size),
        )

    def dealt(self, part: int, parts: int, run: int, several: int = 1) -> Weight:
        """The rows of one of `parts` among which all rows are dealt, `run` at a time, or of `several` parts from that
        one on, as a view."""
        turns, end = self.shape[0] // (parts * run), part + several
        return replace(
            self,
            name=f"{self.name}[{part} of {parts} by {run}]",
            shape=(turns * several * run, *self.shape[1:]),
            data=self._view(self.bytes // parts * several, lambda: self.data.reshape(turns, parts, -1)[:, part:end]),
        )

    def transposed(self) -> Weight:
        """Its transpose, as a view. Of the formats without blocks only."""
        rows, columns = self.shape
        width = FORMATS[self.format].bytes
        data = self._view(self.bytes, lambda: self.data.reshape(rows, columns, width).transpose(1, 0, 2))
        return replace(self, name=f"{self.name}.T", shape=(columns, rows), data=data)

    def _view(self, nbytes: int, view: Callable[[], np.ndarray]) -> np.ndarray | Deferred:
        """Of its data: made now, unless those are not made yet."""
        return Deferred(nbytes, view) if isinstance(self.data, Deferred) else view()

    def within(self, rows: slice) -> Weight:
        """Of a stack, some rows of each matrix, as a view."""
        count, height, width = self.shape
        shape = (count, len(range(height)[rows]), width)
        data = self._view(self.bytes // height * shape[1], lambda: self.data.reshape(count, height, -1)[:, rows])
        return replace(self, name=f"{self.name}[:, {rows.start}:{rows.stop}:{rows.step}]", shape=shape, data=data)

    def each_transposed(self) -> Weight:
        """A stack of the transposes. Of the formats without blocks only."""
        count, height, width = self.shape

        def turn() -> np.ndarray:
            return self.data.reshape(count, height, width, -1).swapaxes(1, 2)

        return replace(self, name=f"{self.name}.T", shape=(count, width, height), data=Deferred(self.bytes, turn))

    def each(self) -> Sequence[np.ndarray]:
        """The data of every matrix, as uint8 [bytes]: of one, or of a stack's."""
        return list(self.flat().reshape(self.shape[0] if len(self.shape) == 3 else 1, -1))

    def flat(self) -> np.ndarray:
        """The data as uint8 [bytes], row-major; copied only if they are not."""
        return np.ascontiguousarray(self.data.reshape(-1))

    def dequantise(self) -> np.ndarray:
        """The whole weight as float32 of `shape`. Of an f32 weight this is a view, not a copy."""
        if self.format == "f32":
            return self.data.view(np.float32).reshape(self.shape)
        if self.format == "f16":
            return self.data.view(np.float16).astype(np.float32).reshape(self.shape)
        if self.format == "bf16":  # the upper half of a float32
            return (self.data.view(np.uint16).astype(np.uint32) << 16).view(np.float32).reshape(self.shape)
        format = FORMATS[self.format]
        blocks = self.data.reshape(-1, format.bytes)
        out = np.empty((len(blocks), format.numbers), np.float32)
        for start in range(0, len(blocks), _BLOCKS_AT_ONCE):
            part = slice(start, start + _BLOCKS_AT_ONCE)
            with np.errstate(invalid="ignore"):  # an infinite scale times 0 is NaN, which `prepare` refuses
                dequantise(READERS[self.format], blocks[part], out[part])
        return out.reshape(self.shape)


@dataclass(frozen=True)
class Stack(Weight):
    """A stack, [matrices, out, in], whose matrices are tensors of their own, of one shape and format. It has no `data`;
    `stack` makes one.

    Attributes:
        matrices: in order.
    """

    matrices: tuple[Weight, ...] = ()

    @property
    def bytes(self) -> int:
        return sum(matrix.bytes for matrix in self.matrices)

    @property
    def origins(self) -> tuple[Origin, ...]:
        return tuple(origin for matrix in self.matrices for origin in matrix.origins)

    def each(self) -> Sequence[np.ndarray]:
        return [matrix.flat() for matrix in self.matrices]

    def dequantise(self) -> np.ndarray:
        return np.stack([matrix.dequantise() for matrix in self.matrices])


def stack(name: str, matrices: Sequence[Weight]) -> Stack:
    """Matrices of one shape and format, at least one, as a stack. name: for error messages."""
    first = matrices[0]
    shape = (len(matrices), *first.shape)
    return Stack(name, shape, first.format, np.empty(0, np.uint8), matrices=tuple(matrices))


def plus_one(weight: Weight) -> Weight:
    """A vector with 1 added to each number, as float32."""
    numbers = weight.dequantise() + np.float32(1)
    return replace(weight, format="f32", data=numbers.view(np.uint8).reshape(-1))
