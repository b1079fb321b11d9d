"""Which backend computes, and whether it does as the options say."""

from __future__ import annotations

import logging

from threadpoolctl import ThreadpoolController

from headway.core.errors import BadInput
from headway.engine.machine import usable_cores
from headway.engine.options import EngineOptions
from headway.model.source import cache_folder
from headway.ops.protocol import Backend
from headway.ops.registry import BackendSetup, backends, find_backend

logger = logging.getLogger(__name__)

STABLE_BLOCKS = (32, 64, 128, 256)  # divide the native kernels' SPLIT, and are no smaller than their vectors


def choose_backend(options: EngineOptions) -> tuple[Backend, int]:
    """What computes, and with how many threads.

    Raises:
        BadInput: it cannot be used here, or not as the options say.
    """
    threads = options.threads or usable_cores()
    backend = backend_of(options, threads)
    if backends()[backend.name].blas:
        limit_blas(options.threads, threads)
    _check_deterministic(options, backend)
    return backend, threads


def backend_of(options: EngineOptions, threads: int) -> Backend:
    """A backend as the options say; `make_backend` has the errors."""
    return make_backend(options.backend, threads, options.weights, options.group, options.kv, options.pack_cache)


def make_backend(
    name: str,
    threads: int,
    weights: str = "stored",
    group: int | None = None,
    kv: str | None = None,
    pack_cache: bool = False,
) -> Backend:
    """The backend called `name`; "auto" is the best that can be used here, with a warning if it is slow.

    Raises:
        BadInput: there is none of that name, or it cannot be used here.
    """
    kind = find_backend(name)
    if weights != "stored" and not kind.quantises:
        raise BadInput("--weights", f"{weights!r} needs the native backend; the {name} one computes in float32")
    if kv not in (None, *kind.caches):
        raise BadInput("--kv", f"{kv!r}: the {kind.name} backend's cache holds {', '.join(kind.caches)}")
    best, *_ = backends().values()
    if name == "auto" and kind is not best:
        logger.warning("Serving with the %s backend, many times slower. %s", kind.name, best.why_not())
    folder = cache_folder() / "packed" if pack_cache and weights != "stored" else None
    return kind.make(BackendSetup(threads, weights, group, kv, folder))


def limit_blas(asked: int | None, threads: int) -> None:
    """Let numpy use the threads that were asked for; by default, at most those this process may use."""
    libraries = ThreadpoolController().select(user_api="blas").lib_controllers
    for library in libraries:
        if asked is not None or library.num_threads > threads:
            library.set_num_threads(threads)
    if asked is not None and not libraries:
        logger.warning("--threads does not reach numpy's linear algebra here; set OMP_NUM_THREADS=%d instead", asked)


def _check_deterministic(options: EngineOptions, backend: Backend) -> None:
    """
    Raises:
        BadInput: results are to depend on nothing but the row, and would not.
    """
    if not options.deterministic:
        return
    if not backend.deterministic:
        raise BadInput("--deterministic", f"the {backend.name} backend's results depend on batch shape; use native")
    if options.block_size not in STABLE_BLOCKS:
        accepted = ", ".join(map(str, STABLE_BLOCKS))
        raise BadInput(
            "--block-size",
            f"with {options.block_size}, attention sums in an order of its own; --deterministic accepts {accepted}",
        )
