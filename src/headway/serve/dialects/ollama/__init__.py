"""Ollama's API, as far as it is about talking to a model that is loaded."""

from __future__ import annotations

from headway.serve.dialect import Dialect
from headway.serve.dialects.ollama.format import error_body
from headway.serve.dialects.ollama.routes import ENDPOINTS

OLLAMA = Dialect("/api/", ENDPOINTS, error_body)
