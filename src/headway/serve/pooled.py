"""What all APIs that answer with vectors or scores have in common: the query, and what is read from its answer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from headway.core.errors import BadInput
from headway.core.pooling import PoolingConfig, check_use
from headway.core.request import SamplingParams
from headway.engine.embedding import check_dimensions, vector
from headway.serve.answer import Answer, Format, Query
from headway.serve.choice import Choice, Gain
from headway.serve.dialect import Host, ModelHost
from headway.serve.encode import json_bytes
from headway.serve.errors import ApiError

MAX_INPUTS = 2048  # as OpenAI's

Input = str | list[str | int | list[int]]


def inputs(given: Input | None, field: str) -> list[str | list[int]]:
    """The texts, or token ids, one per vector.

    Raises:
        BadInput: there is none, there are too many, or the list mixes what it holds.
    """
    if given is None:
        raise BadInput(field, "the field is required")
    if isinstance(given, str):
        return [given]
    if not given:
        raise BadInput(field, "the list is empty")
    if all(isinstance(item, int) for item in given):
        return [given]  # type: ignore[list-item]
    if any(isinstance(item, int) for item in given):
        raise BadInput(field, "a list holds token ids only, or inputs only")
    if len(given) > MAX_INPUTS:
        raise BadInput(field, f"{len(given)} inputs; at most {MAX_INPUTS} are accepted in one request")
    return given  # type: ignore[return-value]


def asked(host: Host, name: str | None, pooling: str | None = None) -> tuple[ModelHost, str, PoolingConfig, str]:
    """(the model, the adapter, what it makes of whole texts, how it pools here).

    Raises:
        BadInput: it cannot be asked for this.
    """
    model, adapter = host.find(name)
    _ = model.reader
    assert model.ready is not None, "who has a reader is ready"
    config = model.ready.pooling
    if pooling != "score":
        return model, adapter, config, config.vectors(pooling)
    check_use(config, pooling)
    return model, adapter, config, pooling


def query(
    model: ModelHost, adapter: str, pooling: str, prompts: Sequence[list[int]], field: str,
    make: Callable[[Answer], Format], id_prefix: str, priority: int = 0,
) -> Query:  # fmt: skip
    """One that pools its prompts, which are tokenised."""
    params = SamplingParams(pooling=pooling)
    return Query(
        prompts=prompts, params=params, model=model.name, adapter=adapter, priority=priority, field=field,
        id_prefix=id_prefix, format=make,
    )  # fmt: skip


class Vectors:
    """Vectors of an answer.

    Args:
        width: numbers that the model's have; None = not known. dimensions: how many are wanted; None = all.
        normalise: they get length 1; None = as the model's files say.

    Raises:
        BadInput: the model has no vectors of so many numbers.
    """

    def __init__(
        self, model: ModelHost, config: PoolingConfig, dimensions: int | None, normalise: bool | None = None
    ) -> None:
        if model.ready is not None and model.ready.shape is not None:
            check_dimensions(dimensions, model.ready.shape.d_model, config)
        self._dimensions = dimensions
        self._normalise = config.normalise if normalise is None else normalise

    def of(self, answer: Answer) -> list[np.ndarray]:
        return [vector(prompt.pooled, self._dimensions, self._normalise) for prompt in answer.prompts]


class WholeFormat:
    """An answer that comes in one piece.

    Args:
        body: the answer as JSON.
    """

    stream_type = b"application/json"
    keep_alive = b" "

    def __init__(self, body: Callable[[Answer], Any], answer: Answer) -> None:
        self._body = body
        self._answer = answer

    def whole(self) -> list[bytes]:
        return [json_bytes(self._body(self._answer))]

    def chunk(self, choice: Choice, gain: Gain) -> bytes:
        raise NotImplementedError

    def end(self) -> bytes:
        raise NotImplementedError

    def failed(self, error: ApiError) -> bytes:
        raise NotImplementedError
