"""Work that steps back for the engine."""

from __future__ import annotations

import os
import sys
import threading


def step_back() -> None:
    """This thread goes last when cores are short. It must hold Python's lock for instants only: others wait."""
    if sys.platform == "linux":  # elsewhere a thread has no priority of its own
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 10)
