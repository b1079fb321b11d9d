"""OpenAI's API: chat, completions, models; and vLLM's `/tokenize` and `/detokenize`."""

from __future__ import annotations

from headway.serve.dialect import Dialect
from headway.serve.dialects.openai.format import error_body
from headway.serve.dialects.openai.routes import ENDPOINTS

OPENAI = Dialect("", ENDPOINTS, error_body)
