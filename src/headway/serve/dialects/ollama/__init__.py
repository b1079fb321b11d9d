"""Ollama's API, as far as it is about talking to a model that is loaded."""

from __future__ import annotations

from headway.serve.dialect import Dialect
from headway.serve.dialects.ollama.bodies import HONOURED
from headway.serve.dialects.ollama.format import error_body
from headway.serve.dialects.ollama.routes import ENDPOINTS

OWN = {"max_tokens": "num_predict", "repetition_penalty": "repeat_penalty"}
NAMES = {name: f"options.{OWN.get(name, name)}" for name in (*HONOURED, *OWN, "stop")}
NAMES |= {"variables": "think", "thinking_budget": "think", "adapter": "model"}
OLLAMA = Dialect("/api/", ENDPOINTS, error_body, names=NAMES)
