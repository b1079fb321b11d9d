"""OpenAI's embeddings, with vLLM's extensions."""

from __future__ import annotations

import base64
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec

from headway.core.errors import BadInput, shown
from headway.core.pooling import VECTORS
from headway.serve.answer import Answer, Query
from headway.serve.dialect import Endpoint, Host, known_fields, priority_of
from headway.serve.pooled import Input, Vectors, WholeFormat, asked, inputs, query

if TYPE_CHECKING:
    _Known = msgspec.Struct
else:
    _Known = known_fields("user", "metadata", "input_type", "task", "request_id", "extra_headers")


class EmbeddingRequest(_Known, forbid_unknown_fields=True, kw_only=True):
    """POST /v1/embeddings. `pooling` and what follows extend OpenAI's API; `truncate_prompt_tokens` -1 = as many as the
    context holds."""

    model: str | None = None
    input: Input | None = None
    encoding_format: str | None = None
    dimensions: int | None = None
    pooling: str | None = None
    normalize: bool | None = None
    truncate_prompt_tokens: int | None = None
    priority: int | None = None


def embeddings(body: EmbeddingRequest, host: Host) -> Query:
    if body.encoding_format not in (None, "float", "base64"):
        raise BadInput("encoding_format", f"{shown(body.encoding_format)} is not float or base64")
    if body.pooling not in (None, *VECTORS):
        raise BadInput("pooling", f"{shown(body.pooling)} is not one of {', '.join(VECTORS)}")
    model, adapter, config, pooling = asked(host, body.model, body.pooling)
    vectors = Vectors(model, config, body.dimensions, body.normalize)
    prompts = model.reader.wholes(inputs(body.input, "input"), "input", body.truncate_prompt_tokens)
    make = partial(WholeFormat, partial(_body, vectors, body.encoding_format == "base64"))
    return query(model, adapter, pooling, prompts, "input", make, "embd-", priority_of(body.priority, model))


def _body(vectors: Vectors, packed: bool, answer: Answer) -> dict[str, Any]:
    numbers = [base64.b64encode(one.tobytes()).decode() if packed else one.tolist() for one in vectors.of(answer)]
    data = [{"object": "embedding", "index": index, "embedding": one} for index, one in enumerate(numbers)]
    return {"id": answer.id, "object": "list", "data": data, "model": answer.model, "usage": usage(answer)}


def usage(answer: Answer) -> dict[str, Any]:
    counts = {"prompt_tokens": answer.prompt_tokens, "total_tokens": answer.prompt_tokens}
    return {**counts, "prompt_tokens_details": {"cached_tokens": answer.cached_tokens}, **answer.bill}


ENDPOINTS = (Endpoint("/v1/embeddings", "Vectors of texts.", embeddings, EmbeddingRequest),)
