"""A dialect: an API that clients know, as a thin layer over the one way this server generates.

It turns bodies into a `Query` (parse), writes the `Answer` (stream events, whole answer, usage: `Format`), and says how
an error looks. Routes, error bodies and the OpenAPI document follow from `dialects.DIALECTS`: a new dialect is a folder
beside the others and a name in that list.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import msgspec

from headway.cache.explain import Explanation
from headway.core.errors import BadInput
from headway.engine.ipc import Ready
from headway.engine.messages import LoadAdapter, UnloadAdapter
from headway.serve.errors import ApiError
from headway.serve.store import Kept
from headway.serve.text import PromptReader


class ModelHost(Protocol):
    """What an endpoint may know of a model.

    Attributes:
        name: what clients call it.
        ready: what its engine said; None while it is being loaded.
    """

    name: str
    ready: Ready | None

    @property
    def adapters(self) -> Mapping[str, str]:
        """Path of each LoRA adapter that requests may name, by name."""
        ...

    @property
    def reader(self) -> PromptReader:
        """
        Raises:
            ApiError: 503, requests are not accepted now.
        """
        ...


class Host(Protocol):
    """What an endpoint may know of the server.

    Attributes:
        created: when the server started, Unix seconds.
        lora_folder: where LoRA adapters may be loaded from on request; None = nowhere.
        conversations: those that the request may go on from, which are its key's.
    """

    created: int
    lora_folder: Path | None
    conversations: Kept

    @property
    def models(self) -> Sequence[ModelHost]: ...

    def find(self, name: str | None) -> tuple[ModelHost, str]:
        """The model that a request's `model` names, and the LoRA adapter over it; "" = none. Where there is one model,
        None is that.

        Raises:
            ApiError: 404, a model this server does not have; 400, it has several.
        """
        ...


@dataclass(frozen=True)
class AdapterChange:
    """What an endpoint asks of the engine instead of an answer.

    Attributes:
        model: whose engine.
        command: to load a LoRA adapter, or to forget it.
        answer: what to answer when that is done, as JSON.
    """

    model: str
    command: LoadAdapter | UnloadAdapter
    answer: Callable[[], Any]


@dataclass(frozen=True)
class CacheQuestion:
    """What an endpoint asks of the engine's prefix cache instead of an answer.

    Attributes:
        model, adapter, tokens: which prompt of whom.
        answer: what to answer, as JSON.
    """

    model: str
    adapter: str
    tokens: tuple[int, ...]
    answer: Callable[[Explanation], Any]


@dataclass(frozen=True)
class Counted:
    """What to answer, as JSON, where only text was read and nothing was generated: one request of its key, and so many
    prompt tokens."""

    value: Any
    tokens: int


@dataclass(frozen=True)
class Endpoint:
    """A route.

    Attributes:
        path: as Starlette writes it.
        summary: one sentence for the OpenAPI document.
        answer: (decoded body, or the path's parameters; host) -> a `Query` to run, an `AdapterChange` to make, a
            `CacheQuestion` to ask, or else what to answer, as JSON or `Counted`. A body is looked at in a thread.
        body: what the JSON of a POST is decoded into; None = the route is a GET.
        stream_type: media type of a streamed answer; "" = it never streams.
    """

    path: str
    summary: str
    answer: Callable[[Any, Host], Any]
    body: type[msgspec.Struct] | None = None
    stream_type: str = ""


@dataclass(frozen=True)
class Dialect:
    """An API.

    Attributes:
        prefix: errors of all paths that begin so have this API's shape; of several the longest prefix counts.
        error: the body of an error.
        id_header: what the API calls the header that has a request's id, beside x-request-id.
        names: what its clients call a field that has another name below: in `SamplingParams`, or in a `Query`.
    """

    prefix: str
    endpoints: tuple[Endpoint, ...]
    error: Callable[[ApiError], Any]
    id_header: bytes = b""
    names: Mapping[str, str] = dataclasses.field(default_factory=dict)


def priority_of(given: int | None, model: ModelHost) -> int:
    """
    Raises:
        BadInput: the server has no classes of requests.
    """
    if given and not (model.ready and model.ready.priorities):
        raise BadInput("priority", f"{given} needs a server with --policy priority; accepted here: 0")
    return given or 0


def known_fields(*names: str, base: type[msgspec.Struct] = msgspec.Struct) -> type[msgspec.Struct]:
    """A base of body structs: fields that are known and of which nothing is honoured, of any type, null by default;
    and those of another base."""
    fields = [(name, Any, None) for name in names]
    return msgspec.defstruct("KnownFields", fields, bases=(base,), kw_only=True, forbid_unknown_fields=True)


def refuse(body: msgspec.Struct, neutral: Mapping[str, tuple[Any, ...]], where: str = "") -> None:
    """
    Args:
        neutral: of fields that would change the answer, the values that ask for nothing.
        where: stands before the name of a field.

    Raises:
        ApiError: a field asks for something this server cannot do.
    """
    for field, values in neutral.items():
        value = getattr(body, field, None)
        if value is not None and value not in values:
            name = where + field
            raise ApiError(400, f"{name}: not supported by this server; leave it out", param=name, code="unsupported")
