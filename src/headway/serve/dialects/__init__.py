"""The APIs this server speaks. A new one is a folder here and its name in the list."""

from __future__ import annotations

from headway.serve.dialect import Dialect
from headway.serve.dialects.anthropic import ANTHROPIC
from headway.serve.dialects.ollama import OLLAMA
from headway.serve.dialects.openai import OPENAI
from headway.serve.dialects.responses import RESPONSES

DIALECTS = (OPENAI, RESPONSES, ANTHROPIC, OLLAMA)


def dialect_of(path: str) -> Dialect:
    """Whose errors a path has."""
    return max((one for one in DIALECTS if path.startswith(one.prefix)), key=lambda one: len(one.prefix))
