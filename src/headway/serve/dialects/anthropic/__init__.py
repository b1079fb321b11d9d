"""Anthropic's Messages API."""

from __future__ import annotations

from headway.serve.dialect import Dialect
from headway.serve.dialects.anthropic.format import error_body
from headway.serve.dialects.anthropic.routes import ENDPOINTS

NAMES = {
    "stop": "stop_sequences", "thinking_budget": "thinking.budget_tokens", "variables": "thinking", "adapter": "model",
}  # fmt: skip
ANTHROPIC = Dialect("/v1/messages", ENDPOINTS, error_body, id_header=b"request-id", names=NAMES)
