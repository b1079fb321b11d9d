"""OpenAI's API: chat, completions, embeddings, models; rerank and score; and vLLM's `/tokenize` and `/detokenize`."""

from __future__ import annotations

from headway.serve.dialect import Dialect
from headway.serve.dialects.openai import embeddings, rerank, routes
from headway.serve.dialects.openai.format import error_body

OPENAI = Dialect("", (*routes.ENDPOINTS, *embeddings.ENDPOINTS, *rerank.ENDPOINTS), error_body)
