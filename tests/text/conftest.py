"""Small tokenizers of the kinds that checkpoints ship."""

from __future__ import annotations

import pytest
import tokenizers

from headway.text.tokenizer import Tokenizer
from tests.text.small_tokenizers import hf_source, make_sentencepiece, train_byte_level


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
