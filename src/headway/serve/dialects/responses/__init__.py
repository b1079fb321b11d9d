"""OpenAI's Responses API."""

from __future__ import annotations

from headway.serve.dialect import Dialect
from headway.serve.dialects.openai.format import error_body
from headway.serve.dialects.responses.routes import ENDPOINTS

NAMES = {
    "max_tokens": "max_output_tokens", "logprobs": "top_logprobs", "messages": "input", "variables": "reasoning",
    "adapter": "model",
}  # fmt: skip
RESPONSES = Dialect("/v1/responses", ENDPOINTS, error_body, names=NAMES)
