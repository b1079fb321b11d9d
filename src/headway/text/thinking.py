"""How a model marks its reasoning, as its chat template tells."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from headway.core.thinking import Thinking

MARKS = ("<think>", "</think>")
HARMONY = "<|channel|>"
TAIL = 16  # tokens of a prompt's end that tell whether the reasoning has begun
_FINAL = "<|channel|>final<|message|>"
_LEAVING = "<|end|><|start|>assistant" + _FINAL


def begun(tail: str) -> bool:
    """Whether a prompt that ends so has opened the reasoning."""
    return tail.rstrip().endswith(MARKS[0])


def thinking_of(
    template: str, encode: Callable[[str], Sequence[int]], tail: str, budget: int | None = None
) -> Thinking | None:
    """
    Args:
        template: source of the chat template.
        encode: a text's ids, control tokens by name, without a start token.
        tail: the end of the prompt.

    Returns:
        None: the model does not think, or its opening mark is more than one token.
    """
    if HARMONY in template:
        return Thinking(tuple(encode(_FINAL)), tuple(encode(_LEAVING)), None, budget)
    if MARKS[0] not in template:
        return None
    start, end = (tuple(encode(mark)) for mark in MARKS)
    if begun(tail):
        return Thinking(end, end, None, budget)
    return Thinking(end, end, start[0], budget) if len(start) == 1 else None
