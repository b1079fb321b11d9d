"""Lines that a user types, with editing and history where that is possible."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence

from headway.model.source import cache_folder


class Lines(Iterator[str]):
    """What is typed at a prompt, or comes from a pipe, until its end.

    In a terminal lines are edited as in a shell, kept in a file of the cache folder for the next time, and text of
    several lines may be pasted. Ctrl-C clears a line; in an empty one it is the end, as Ctrl-D.

    Args:
        history: name of the file.
        words: completed with Tab at the start of a line.

    Attributes:
        interactive: somebody sits at a terminal.
    """

    def __init__(self, history: str, words: Sequence[str] = ()) -> None:
        self.interactive = sys.stdin is not None and sys.stdin.isatty()
        whole = self.interactive and sys.stdout.isatty() and os.environ.get("TERM", "dumb") != "dumb"
        self._read: Callable[[], str] = _editor(history, words) if whole else self._plain

    def __next__(self) -> str:
        try:
            return self._read()
        except (EOFError, KeyboardInterrupt):
            raise StopIteration from None

    def _plain(self) -> str:
        if sys.stdin is None:  # closed by whoever started this
            raise EOFError
        if self.interactive:
            print("you: ", end="", file=sys.stderr, flush=True)
        line = sys.stdin.readline()
        if not line:
            raise EOFError
        return line


def _editor(history: str, words: Sequence[str]) -> Callable[[], str]:
    from prompt_toolkit import PromptSession
    from prompt_toolkit.completion import WordCompleter
    from prompt_toolkit.formatted_text import HTML
    from prompt_toolkit.history import FileHistory, History, InMemoryHistory
    from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
    from prompt_toolkit.shortcuts import CompleteStyle

    keys = KeyBindings()

    @keys.add("escape", "enter")
    def _(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    path = cache_folder() / history
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch(mode=0o600)
        known: History = FileHistory(path)
    except OSError:  # a folder that cannot be written: of this session only
        known = InMemoryHistory()
    session: PromptSession[str] = PromptSession(
        HTML("<b>you: </b>"),
        history=known,
        completer=WordCompleter(list(words), sentence=True),
        complete_while_typing=False,
        complete_style=CompleteStyle.READLINE_LIKE,
        reserve_space_for_menu=0,
        key_bindings=keys,
    )

    def read() -> str:
        while True:
            try:
                return session.prompt()
            except KeyboardInterrupt:
                if not session.default_buffer.text:
                    raise

    return read
