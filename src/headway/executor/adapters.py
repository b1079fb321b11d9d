"""The adapters that are loaded: their names, as requests say them, and their numbers, as steps do.

    name --identity--> "name@digest" (a request's, and part of its cache key) --number--> StepBatch.adapter

An adapter that is unloaded, or replaced by another of its name, keeps its number until no request has its identity.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from pathlib import Path

from headway.core.errors import BadInput, shown
from headway.model.adapter_file import AdapterFile, read_adapter
from headway.model.adapters import Adaptable

_NAME = re.compile(r"[\w][\w.:/ -]{0,127}")


class AdapterTable:
    """Loads and unloads adapters between steps.

    Args:
        adaptable: where they go.

    Attributes:
        loaded: the file of each adapter that requests may name.
    """

    def __init__(self, adaptable: Adaptable) -> None:
        self._adaptable = adaptable
        self._numbers: dict[str, int] = {}  # by identity
        self.loaded: dict[str, AdapterFile] = {}

    def load(self, name: str, path: Path, live: Collection[str] = (), replace: bool = False) -> None:
        """Make an adapter known.

        Args:
            live: identities that requests have.
            replace: in place of the one that has the name, if one does.

        Raises:
            BadInput: the name is taken or none, there is no room, or nothing at the path.
            ModelFileError: the adapter is broken, or does not fit the model.
        """
        if not _NAME.fullmatch(name):
            raise BadInput("lora", f"{shown(name)} is not a name of up to 128 letters, digits and . _ - : /")
        if name in self.loaded and not replace:
            raise BadInput("lora", f"{shown(name)} is loaded already; unload it first")
        file = read_adapter(path)
        self._adaptable.check(file)
        identity = _identity(name, file)
        ready = self._adaptable.prepare(file) if identity not in self._numbers else None
        former = self.loaded.pop(name, None)
        if ready is not None:  # else it was unloaded, and requests still use it
            try:
                number = self._free_number(live)
            except BadInput:
                if former is not None:
                    self.loaded[name] = former
                raise
            self._adaptable.put(number, ready)
            self._numbers[identity] = number
        self.loaded[name] = file

    def _free_number(self, live: Collection[str]) -> int:
        self.release(live)
        most = self._adaptable.limits.count
        free = set(range(1, most + 1)) - set(self._numbers.values())
        if not free:
            problem = (
                f"there is room for {most} adapters (--max-loras), taken by {', '.join(sorted(self.loaded)) or 'none'}"
            )
            used = len(self._numbers) - len(self.loaded)
            raise BadInput("lora", problem + (f", and {used} unloaded that requests still use" if used else ""))
        return min(free)

    def unload(self, name: str, live: Collection[str] = ()) -> None:
        """Forget an adapter; requests that use it end as they would.

        Raises:
            BadInput: there is none of that name.
        """
        self.identity(name)
        del self.loaded[name]
        self.release(live)

    @property
    def leaving(self) -> bool:
        """Some number is kept for requests alone."""
        return len(self._numbers) > len(self.loaded)

    def release(self, live: Collection[str]) -> None:
        """Give back the numbers of adapters that are not loaded any more, and not used."""
        kept = {_identity(name, file) for name, file in self.loaded.items()}
        for identity in self._numbers.keys() - kept - set(live):
            self._adaptable.clear(self._numbers.pop(identity))

    def identity(self, name: str) -> str:
        """What stands for an adapter and its contents; "" of none.

        Raises:
            BadInput: there is none of that name.
        """
        if not name:
            return ""
        if name not in self.loaded:
            known = ", ".join(sorted(self.loaded)) or "none"
            raise BadInput("adapter", f"{shown(name)} is not loaded; loaded: {known}")
        return _identity(name, self.loaded[name])

    def number(self, identity: str) -> int | None:
        """Of an identity in steps; 0 = no adapter, None = it is not here."""
        return self._numbers.get(identity) if identity else 0


def _identity(name: str, file: AdapterFile) -> str:
    return f"{name}@{file.digest}"
