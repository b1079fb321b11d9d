"""Every family through the whole engine: log-probabilities of a prompt, whole and in chunks, are transformers'."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from headway import LLM, SamplingParams
from headway.ops import native
from tests.model.checkpoints import FAMILIES, VARIANTS, logits, make, prompt
from tests.model.mixtures import MIXTURES
from tests.text.small_tokenizers import train_byte_level

NEEDS_KERNELS = pytest.mark.skipif(not native.available(), reason=str(native.why_not()))
IDS = prompt(150, seed=5)
WITH_EXPERTS = ("mixtral", "qwen2_moe", "qwen3_moe", "gpt_oss", "deepseek_v2", "deepseek_v3")


def expected(logits: np.ndarray) -> np.ndarray:
    """Log-probability of each token of IDS but the first, [149]."""
    shifted = logits.astype(np.float64) - logits.max(axis=-1, keepdims=True)
    logprobs = shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    return logprobs[np.arange(len(IDS) - 1), IDS[1:]]


@pytest.mark.parametrize("variant", ["grouped", *FAMILIES, *WITH_EXPERTS])
@pytest.mark.parametrize("backend", ["reference", pytest.param("native", marks=NEEDS_KERNELS)])
def test_logprobs_of_a_prompt(tmp_path: Path, variant: str, backend: str) -> None:
    want = expected(logits(make(tmp_path, **(VARIANTS | MIXTURES)[variant]), IDS))
    train_byte_level().save(str(tmp_path / "tokenizer.json"))
    for chunk in (32, 512):
        with LLM(tmp_path, backend=backend, kv_cache_gib=0.01, threads=1, max_step_tokens=chunk) as llm:
            (answer,) = llm.generate([IDS], SamplingParams(max_tokens=2, temperature=0, prompt_logprobs=0))
        got = np.array([position.logprob for position in answer.prompt_logprobs])
        assert len(answer.choices[0].tokens) == 2
        error = np.abs(got - want)
        assert error.max() < 2e-3 if backend == "reference" else error.mean() < 0.08
