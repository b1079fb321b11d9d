"""The APIs this server speaks. A new one is a folder here and its name in the list."""

from __future__ import annotations

from headway.serve.dialects.ollama import OLLAMA
from headway.serve.dialects.openai import OPENAI

DIALECTS = (OPENAI, OLLAMA)
