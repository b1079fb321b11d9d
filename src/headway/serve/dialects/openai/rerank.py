"""How well texts fit: Jina's and Cohere's rerank, and vLLM's score, of models with a classification head."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec

from headway.core.errors import BadInput
from headway.core.pooling import PoolingConfig
from headway.engine.embedding import relevance
from headway.serve.answer import Answer, Query
from headway.serve.dialect import Endpoint, Host, known_fields
from headway.serve.dialects.openai.embeddings import usage
from headway.serve.pooled import MAX_INPUTS, WholeFormat, asked, query

if TYPE_CHECKING:
    _Known = msgspec.Struct
else:
    _Known = known_fields("user", "request_id", "max_chunks_per_doc", "max_tokens_per_doc")


class Document(msgspec.Struct, kw_only=True):
    """A document as an object; other fields are ignored."""

    text: str


class RerankRequest(_Known, forbid_unknown_fields=True, kw_only=True):
    """POST /v1/rerank."""

    model: str | None = None
    query: str
    documents: list[str | Document]
    top_n: int | None = None
    return_documents: bool | None = None
    truncate_prompt_tokens: int | None = None


class ScoreRequest(_Known, forbid_unknown_fields=True, kw_only=True):
    """POST /v1/score: one text and others, or as many pairs. vLLM calls them by both names."""

    model: str | None = None
    text_1: str | list[str] | None = None
    text_2: str | list[str] | None = None
    queries: str | list[str] | None = None
    documents: str | list[str] | None = None
    truncate_prompt_tokens: int | None = None


def rerank(body: RerankRequest, host: Host) -> Query:
    texts = [one if isinstance(one, str) else one.text for one in body.documents]
    if body.top_n is not None and body.top_n < 1:
        raise BadInput("top_n", f"{body.top_n} is not a number of documents above 0")
    shown = texts if body.return_documents is not False else None
    return _scored(body, host, [(body.query, text) for text in texts], "documents", partial(_ranked, shown, body.top_n))


def score(body: ScoreRequest, host: Host) -> Query:
    first = body.text_1 if body.text_1 is not None else body.queries
    second = body.text_2 if body.text_2 is not None else body.documents
    if first is None or second is None:
        raise BadInput("text_1" if first is None else "text_2", "the field is required")
    left, right = ([one] if isinstance(one, str) else one for one in (first, second))
    if len(left) == 1:
        left = left * len(right)
    if len(left) != len(right):
        raise BadInput("text_2", f"{len(right)} texts for {len(left)}; give one text_1, or as many")
    return _scored(body, host, list(zip(left, right, strict=True)), "text_2", _scores)


def _scored(
    body: RerankRequest | ScoreRequest, host: Host, pairs: Sequence[tuple[str, str]], field: str, make: Any
) -> Query:
    if not 0 < len(pairs) <= MAX_INPUTS:
        raise BadInput(field, f"{len(pairs)} texts; 1 to {MAX_INPUTS} are accepted in one request")
    model, adapter, config, pooling = asked(host, body.model, "score")
    if config.labels > 2:
        raise BadInput("model", f"its classification head has {config.labels} labels, which is no yes or no")
    prompts = [model.reader.pair(*pair, f"{field}[{n}]", body.truncate_prompt_tokens) for n, pair in enumerate(pairs)]
    return query(model, adapter, pooling, prompts, field, partial(WholeFormat, partial(make, config)), "score-")


def _ranked(texts: list[str] | None, top: int | None, config: PoolingConfig, answer: Answer) -> dict[str, Any]:
    scores = [relevance(prompt.pooled, config) for prompt in answer.prompts]
    order = sorted(range(len(scores)), key=lambda index: -scores[index])[:top]
    results: list[dict[str, Any]] = [{"index": index, "relevance_score": scores[index]} for index in order]
    if texts is not None:
        results = [{**one, "document": {"text": texts[one["index"]]}} for one in results]
    return {"id": answer.id, "model": answer.model, "usage": usage(answer), "results": results}


def _scores(config: PoolingConfig, answer: Answer) -> dict[str, Any]:
    data = [
        {"index": index, "object": "score", "score": relevance(prompt.pooled, config)}
        for index, prompt in enumerate(answer.prompts)
    ]
    about = {"id": answer.id, "object": "list", "created": answer.created, "model": answer.model}
    return {**about, "data": data, "usage": usage(answer)}


ENDPOINTS = (
    Endpoint("/v1/rerank", "Order documents by how well they fit a query.", rerank, RerankRequest),
    Endpoint("/rerank", "The same.", rerank, RerankRequest),
    Endpoint("/v1/score", "How well texts fit each other.", score, ScoreRequest),
)
