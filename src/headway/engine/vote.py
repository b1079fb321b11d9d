"""Majority vote over the choices of one prompt (self-consistency; Wang et al. 2023): what most of them say counts."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from headway.core.errors import BadInput, shown
from headway.engine.results import Completion

Extractor = Callable[[str], str | None]
MAX_PATTERN = 1000  # characters
_STEP = re.compile(r"\.([A-Za-z_][\w-]*)|\[(\d{1,6})\]|\['([^']*)'\]")


@dataclass
class Vote:
    """How it went.

    Attributes:
        answer: what most choices said; of equally many, what was said first. None if none said anything.
        votes: choices per answer.
        completion: all choices; those that could not change the outcome any more are aborted.
    """

    answer: str | None
    votes: Counter[str]
    completion: Completion


def by_regex(pattern: str) -> Extractor:
    """The last match in a text: its first group, or all of it if it has none.

    Raises:
        BadInput: it is no regular expression.
    """
    if not isinstance(pattern, str) or not 0 < len(pattern) <= MAX_PATTERN:
        raise BadInput("regex", f"{shown(pattern)} is not a pattern of 1 to {MAX_PATTERN} characters")
    try:
        compiled = re.compile(pattern)
    except re.error as error:
        raise BadInput("regex", f"{shown(pattern)}: {error}") from None

    def extract(text: str) -> str | None:
        last = max(compiled.finditer(text), key=lambda match: match.start(), default=None)
        return None if last is None else last.group(1 if compiled.groups else 0)

    return extract


def by_json_path(path: str) -> Extractor:
    """The value at a path like `$.answer`, `$.items[0].name` or `$['a b']` of the text, which is JSON; what is no text
    as JSON with sorted keys.

    Raises:
        BadInput: it is no such path.
    """
    steps: list[str | int] = []
    rest = path[1:] if isinstance(path, str) and path.startswith("$") else "?"
    while rest:
        step = _STEP.match(rest)
        if step is None:
            raise BadInput("json_path", f"{shown(path)} is not a path like $.answer or $.items[0].name")
        name, index, quoted = step.groups()
        steps.append(int(index) if index is not None else name if name is not None else quoted)
        rest = rest[step.end() :]

    def extract(text: str) -> str | None:
        try:
            value: Any = json.loads(text)
            for step in steps:
                value = None if isinstance(value, str) else value[step]  # a text has no parts
        except (ValueError, KeyError, IndexError, TypeError, RecursionError):
            return None
        return value if isinstance(value, str) else json.dumps(value, sort_keys=True, ensure_ascii=False)

    return extract


def decided(votes: Counter[str], left: int) -> bool:
    """Whether `left` more votes cannot change who has most."""
    (_, most), (_, second) = [*votes.most_common(2), ("", 0), ("", 0)][:2]
    return most - second > left or left == 0
