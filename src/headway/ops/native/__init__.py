"""The native CPU backend: kernels in C++ for AVX-512, AVX2 and plain machines, chosen at run time.

The compiled module may be missing (no compiler when Headway was installed). `available()` says whether it is there,
`why_not()` what is wrong, and `headway.ops.reference` computes the same, slowly.
"""

from __future__ import annotations

import importlib
from types import ModuleType


def load() -> ModuleType:
    """The compiled module.

    Raises:
        ImportError: it was not built, or does not fit this Python or machine.
    """
    return importlib.import_module("headway.ops.native._native")


def why_not() -> str | None:
    """Why the native kernels cannot be used, in one sentence; None if they can."""
    try:
        load()
    except ModuleNotFoundError:
        return (
            "The native kernels were not built when Headway was installed: install a C++17 compiler (g++ or clang++), "
            "then reinstall Headway."
        )
    except ImportError as error:
        return f"The native kernels were built but do not load ({error}): reinstall Headway."
    return None


def available() -> bool:
    """Whether the native kernels can be used."""
    return why_not() is None
