"""OpenAI's API: chat, completions, embeddings, models; rerank and score; and vLLM's `/tokenize` and `/detokenize`."""

from __future__ import annotations

from headway.serve.dialect import Dialect
from headway.serve.dialects.openai import embeddings, rerank, routes
from headway.serve.dialects.openai.format import error_body

NAMES = {
    "thinking_budget": "thinking_token_budget", "bad_token_ids": "bad_words", "variables": "chat_template_kwargs",
    "adapter": "model", "lora": "lora_name",
}  # fmt: skip
OPENAI = Dialect("", (*routes.ENDPOINTS, *embeddings.ENDPOINTS, *rerank.ENDPOINTS), error_body, names=NAMES)
