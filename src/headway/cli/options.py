"""Options that several verbs share, defined once."""

from __future__ import annotations

from typing import Annotated

import typer

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
MaxTokens = Annotated[int, typer.Option(help="Most tokens to generate.")]
Temperature = Annotated[float, typer.Option(help="0 = greedy.")]
Seed = Annotated[int | None, typer.Option(help="Same seed, same answer; default: a random one.")]
