"""Small tokenizers, and the demo checkpoint where the machine has it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import tokenizers
from small_tokenizers import hf_source, make_sentencepiece, train_byte_level

from headway.text.tokenizer import Tokenizer


@pytest.fixture(scope="session")
def byte_level() -> tokenizers.Tokenizer:
    return train_byte_level()


@pytest.fixture(scope="session")
def sentencepiece() -> tokenizers.Tokenizer:
    return make_sentencepiece()


@pytest.fixture(scope="session")
def byte_level_tokenizer(byte_level: tokenizers.Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer(hf_source(byte_level, tmp_path_factory.mktemp("bytes")))


@pytest.fixture(scope="session")
def sentencepiece_tokenizer(sentencepiece: tokenizers.Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer(hf_source(sentencepiece, tmp_path_factory.mktemp("pieces"), bos_id=1))


@pytest.fixture(scope="session")
def demo_gguf() -> Path:
    """The demo checkpoint, SmolLM2-135M-Instruct; named by HEADWAY_DEMO_GGUF."""
    path = os.environ.get("HEADWAY_DEMO_GGUF")
    if not path or not Path(path).exists():
        pytest.skip("HEADWAY_DEMO_GGUF does not name the demo checkpoint")
    return Path(path)
