"""The backends there are, best first. Each registers itself where it is defined; whoever needs one asks by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

from headway.core.errors import BadInput
from headway.ops.protocol import Backend, Probed

_MODULES = ("headway.ops.native.backend", "headway.ops.reference")  # importing one registers it
_KINDS: dict[str, BackendKind] = {}


@dataclass(frozen=True)
class BackendSetup:
    """What a backend is made for.

    Attributes:
        threads: how many compute; None = one per core this process may use.
        weights: "stored", or what matrices are quantised to at load; group: weights that share a scale then.
        kv: what the cache is kept in, one of the kind's `caches`; None = the first of these.
        pack_cache: folder to keep what was quantised in, for the next start; None = nowhere.
    """

    threads: int | None = None
    weights: str = "stored"
    group: int | None = None
    kv: str | None = None
    pack_cache: Path | None = None


@dataclass(frozen=True)
class BackendKind:
    """A backend that can be made.

    Attributes:
        name: what users call it.
        make: creates one.
        why_not: why it cannot be used on this machine; None if it can.
        rank: "auto" takes the lowest that can be used.
        caches: formats that it keeps keys and values in, its usual one first.
        quantises: it can quantise weights at load.
        blas: it computes with numpy's linear algebra, whose threads are set for the whole process.
        holding: of a weight format as step-time profiles name it: how to set a backend up that holds matrices so, and
            the format they are stored in. BadInput if it holds none so.
        probe: makes one that measures the machine with its own kernels; None = it has none.
        probed: the number formats whose rate that measures.
    """

    name: str
    make: Callable[[BackendSetup], Backend]
    why_not: Callable[[], str | None]
    holding: Callable[[str], tuple[BackendSetup, str]]
    rank: int
    caches: tuple[str, ...]
    quantises: bool = False
    blas: bool = False
    probe: Callable[[int], Probed] | None = None
    probed: tuple[str, ...] = ()


def register(kind: BackendKind) -> None:
    """Called by the module of a backend."""
    _KINDS[kind.name] = kind


def backends() -> dict[str, BackendKind]:
    """By name, best first."""
    for module in _MODULES:
        import_module(module)
    return dict(sorted(_KINDS.items(), key=lambda item: item[1].rank))


def find_backend(name: str = "auto") -> BackendKind:
    """The backend of that name; "auto" is the best that can be used here.

    Raises:
        BadInput: there is none of that name, or it cannot be used here.
    """
    kinds = backends()
    if name == "auto":
        return next(kind for kind in kinds.values() if kind.why_not() is None)
    if name not in kinds:
        raise BadInput("--backend", f"{name!r} is not one of {', '.join(['auto', *kinds])}")
    missing = kinds[name].why_not()
    if missing is not None:
        raise BadInput("--backend", f"{name} cannot be used. {missing}")
    return kinds[name]
