"""Can the endpoint's token counts be believed? They are held against whatever else can count.

Without a tokenizer there is the stream (a chunk with text holds at least one token: see `client.usage_fault`), how many
tokens the endpoint makes of a common word, and how many it says a chunk holds. With the model's tokenizer the prompts
and answers are counted again here. A discrepancy is a finding with its figures; metrics stay by usage.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from headway.bench.workload import Measure
from headway.core.errors import BadInput, HeadwayError
from headway.metrics.records import Kind, RequestRecord

ANSWER_SLACK, ANSWER_SHARE = 4, 0.05  # an end token, tags of reasoning, texts that were not tokenised the usual way
PROMPT_SLACK, PROMPT_SHARE = 2, 0.02
PER_WORD = (0.9, 1.5)  # prompt tokens per short common word, of all tokenizers we know
PER_CHUNK = 1.5  # above: drafts, slow streaming, or a count that is too high


class Recount:
    """A checkpoint's tokenizer, for counting: a folder with tokenizer.json, that file, or a .gguf file."""

    def __init__(self, reference: str) -> None:
        """
        Raises:
            BadInput: there is no tokenizer of that name.
        """
        from headway.model.checkpoint import open_checkpoint, tokenizer_source
        from headway.model.source import merges_folder, resolve
        from headway.text.source import TokenizerSource
        from headway.text.tokenizer import Tokenizer

        self.name = reference
        try:
            path = Path(resolve(reference))
            if path.suffix == ".gguf":
                checkpoint = open_checkpoint(path)
                known = checkpoint.config.values.get("tokenizer.ggml.tokens")
                source = tokenizer_source(checkpoint, len(known) if isinstance(known, list) else 1)
            else:
                folder = path if path.is_dir() else path.parent
                source = TokenizerSource(kind="hf", path=folder, vocab_size=1 << 31, metadata={})
            self._tokenizer = Tokenizer(source, cache=merges_folder())
        except HeadwayError as error:
            raise BadInput("--tokenizer", str(error)) from None

    def count(self, text: str) -> int:
        return len(self._tokenizer.encode(text, add_special=False, allow_special=False))


def check_usage(
    records: Sequence[RequestRecord], prompts: Sequence[tuple[str, RequestRecord]], measure: Measure, by: Recount | None
) -> dict[str, Any]:
    """The `usage` object of a run.

    Args:
        records: the measured requests, with their texts where `by` is given.
        prompts: (text, its request), also of the first contact, whose lengths differ.
        measure: what the first contact told of the endpoint's counting.
    """
    told = [r for r in records if r.completed and r.usage_trusted and r.token_events()]
    chunks = sum(len(r.token_events()) for r in told)
    per_chunk = sum(r.output_tokens or 0 for r in told) / chunks if chunks else None
    found: dict[str, Any] = {
        "counted_by": by.name if by else None, "tokens_per_word": measure.per_word if measure.known else None,
        "tokens_per_chunk": per_chunk, "output": None, "prompt": None, "findings": [],
    }  # fmt: skip
    if by is None:
        found["findings"] = _without_tokenizer(measure, per_chunk)
        return found
    found["output"], outputs = _outputs(told, by)
    found["prompt"], inputs = _prompts(prompts, by)
    found["findings"] = outputs + inputs
    return found


def _without_tokenizer(measure: Measure, per_chunk: float | None) -> list[str]:
    findings = []
    if measure.known and not PER_WORD[0] <= measure.per_word <= PER_WORD[1]:
        low, high = PER_WORD
        findings.append(
            f"usage counts {measure.per_word:.2f} prompt tokens per short common word, where tokenizers make {low} to "
            f"{high}: prompt_tokens may be wrong (--tokenizer checks it)"
        )
    if per_chunk is not None and per_chunk > PER_CHUNK:
        findings.append(
            f"usage counts {per_chunk:.2f} output tokens per chunk: drafts, chunks that hold several tokens, or a "
            "count that is too high (--tokenizer checks it)"
        )
    return findings


def _outputs(told: Sequence[RequestRecord], by: Recount) -> tuple[dict[str, Any], list[str]]:
    """Answers counted again. Those with tool calls are left out: their markup is not in the stream."""
    plain = [r for r in told if r.text is not None and not any(chunk.kind is Kind.TOOL for chunk in r.chunks)]
    pairs = [(r.index, r.output_tokens or 0, by.count("".join(r.text or ()))) for r in plain]
    off = [pair for pair in pairs if abs(pair[1] - pair[2]) > max(ANSWER_SLACK, ANSWER_SHARE * pair[2])]
    found = _tally(pairs, len(off))
    if not off:
        return found, []
    return found, [
        f"completion_tokens of {len(off)} of {len(pairs)} answers differ from the tokenizer's count of their text: "
        f"{found['usage']} by usage, {found['counted']} counted in all; TPOT and throughput are by usage"
    ]


def _prompts(prompts: Sequence[tuple[str, RequestRecord]], by: Recount) -> tuple[dict[str, Any], list[str]]:
    """Prompts counted again: usage must be the text's tokens plus one constant, the template's."""
    pairs = [(r.index, r.prompt_tokens, by.count(text)) for text, r in prompts if r.prompt_tokens is not None]
    if not pairs:
        return {"checked": 0, "off": 0, "reason": "no prompt whose text alone is the prompt has a count"}, []
    template = float(np.median([usage - counted for _, usage, counted in pairs]))
    off = [p for p in pairs if abs(p[1] - p[2] - template) > max(PROMPT_SLACK, PROMPT_SHARE * p[2])]
    found = _tally(pairs, len(off)) | {"template_tokens": template}
    short, long = min(pairs, key=lambda p: p[2]), max(pairs, key=lambda p: p[2])
    slope = (long[1] - short[1]) / (long[2] - short[2]) if long[2] > short[2] else 1.0
    found["usage_per_token"] = slope
    findings = []
    if abs(slope - 1) > PROMPT_SHARE and off:
        findings.append(f"prompt_tokens grows by {slope:.2f} per token that the tokenizer counts; it should be 1")
    elif off:
        findings.append(f"prompt_tokens of {len(off)} of {len(pairs)} prompts differ from the tokenizer's count")
    if template < 0:
        findings.append(f"prompt_tokens is {-template:.0f} tokens below what the tokenizer counts in the text alone")
    return found, findings


def _tally(pairs: Sequence[tuple[int, int, int]], off: int) -> dict[str, Any]:
    worst = max(pairs, key=lambda pair: abs(pair[1] - pair[2]), default=None)
    return {
        "checked": len(pairs), "off": off, "usage": sum(pair[1] for pair in pairs),
        "counted": sum(pair[2] for pair in pairs),
        "worst": dict(zip(("request", "usage", "counted"), worst, strict=True)) if worst else None,
    }  # fmt: skip
