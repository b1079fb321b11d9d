"""How many threads numpy's linear algebra uses: told to the library that numpy has loaded, for the whole process.

numpy itself has no call for it, and the environment (OPENBLAS_NUM_THREADS) only counts before numpy is imported.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

_NAMES = ("openblas", "mkl_rt", "libblis")
# (reads, sets): OpenBLAS as the wheels of numpy and scipy call it, and as Linux distributions do; MKL; BLIS.
_CALLS = (
    *(
        (f"{prefix}openblas_get_num_threads{suffix}", f"{prefix}openblas_set_num_threads{suffix}")
        for prefix in ("scipy_", "")
        for suffix in ("64_", "_64_", "")
    ),
    ("MKL_Get_Max_Threads", "MKL_Set_Num_Threads"),
    ("bli_thread_get_num_threads", "bli_thread_set_num_threads"),
)


class Blas:
    """The library that multiplies numpy's matrices, if it can be told a number of threads.

    Attributes:
        found: whether it can.
    """

    def __init__(self) -> None:
        self._calls = next(_controls(), None)

    @property
    def found(self) -> bool:
        return self._calls is not None

    @property
    def threads(self) -> int | None:
        """Threads it uses now; None if it cannot be asked."""
        return None if self._calls is None else int(self._calls[0]())

    def use(self, threads: int) -> None:
        """From now on use so many threads, in all of this process."""
        assert self._calls is not None, "ask `found` first"
        self._calls[1](ctypes.c_int(threads))


def _controls() -> Iterator[tuple[Callable[..., int], Callable[..., int]]]:
    for path in _libraries():
        try:
            library = ctypes.CDLL(str(path))
        except OSError:
            continue
        for read, write in _CALLS:
            if hasattr(library, read) and hasattr(library, write):
                yield getattr(library, read), getattr(library, write)


def _libraries() -> list[Path]:
    """Libraries of those names that are loaded (Linux), or lie beside numpy as its wheels put them."""
    maps = Path("/proc/self/maps")
    loaded = {line.split()[-1] for line in maps.read_text().splitlines()} if maps.exists() else set()
    package = Path(np.__file__).parent
    beside = [*package.parent.glob("numpy.libs/*"), *package.glob(".dylibs/*")]
    return [path for path in (*map(Path, sorted(loaded)), *beside) if any(name in path.name for name in _NAMES)]
