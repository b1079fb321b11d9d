"""Options that several verbs share, defined once."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

API_KEY = "HEADWAY_API_KEY"

Model = Annotated[
    str | None,
    typer.Argument(help="A folder, a .gguf file, or package:NAME==VERSION#FILE; default: the built-in model."),
]
KVCacheGiB = Annotated[float | None, typer.Option(help="GiB for the KV cache; default: from free memory.")]
MaxModelLen = Annotated[
    int | None, typer.Option(help="Longest prompt + output in tokens; default: the model's context.")
]
Threads = Annotated[int | None, typer.Option(help="CPU threads; default: the cores this process may use.")]
Backend = Annotated[str, typer.Option(help="auto, native, or reference.")]
Weights = Annotated[str, typer.Option(help="stored, or int8 or int4: quantise 16 and 32-bit weights at load.")]
Group = Annotated[
    int | None,
    typer.Option(help="With --weights: numbers per scale, 16, 32, 64 or 128; default: 128 for int8, 32 for int4."),
]
PackCache = Annotated[
    bool, typer.Option(help="With --weights: keep the quantised weights on disk, so that the next start is quick.")
]
MaxTokens = Annotated[int, typer.Option(help="Most tokens to generate.")]
Temperature = Annotated[float, typer.Option(help="0 = greedy.")]
ApiKeyFile = Annotated[
    Path | None, typer.Option(help="File with the server's API key; default: the environment's HEADWAY_API_KEY.")
]
Seed = Annotated[int | None, typer.Option(help="Same seed, same answer; default: a random one.")]


def api_key(file: Path | None) -> str | None:
    """The key a client sends: the first of `file`, which may be the server's own, else of the environment.

    There is no option that takes the key itself: other users of the machine can read command lines.

    Raises:
        BadInput: the file cannot be read or holds no key, or the key is none that a header may carry.
    """
    from headway.serve.auth import check_key, read_keys

    if file is not None:
        return read_keys(file)[0]
    key = os.environ.get(API_KEY)
    if key:
        check_key(key, API_KEY, API_KEY)
    return key or None
