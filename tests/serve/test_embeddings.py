"""Embeddings, rerank and score over HTTP: OpenAI's SDK unmodified, Ollama's bodies, and what is refused."""

from __future__ import annotations

import base64
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
from safetensors.numpy import load_file, save_file

from tests.serve.conftest import Server, write_tiny_checkpoint

SERVE = [sys.executable, "-m", "headway", "serve", "--port", "0", "--kv-cache-gib", "0.01"]


@pytest.fixture
def sdk(tiny: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{tiny.url}/v1", api_key="none", max_retries=0)


def unpacked(packed: str) -> np.ndarray:
    return np.frombuffer(base64.b64decode(packed), "<f4")


def test_the_sdk_gets_the_same_vectors_in_both_encodings(sdk: openai.OpenAI, tiny: Server) -> None:
    answer = sdk.embeddings.create(model="tiny", input=["hello", "a longer text than that"])  # base64 by default
    assert [one.index for one in answer.data] == [0, 1] and answer.usage.prompt_tokens == answer.usage.total_tokens > 2
    vectors = np.array([one.embedding for one in answer.data], np.float32)
    assert vectors.shape == (2, 64)
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, rtol=1e-6)
    plain = sdk.embeddings.create(model="tiny", input="hello", encoding_format="float").data[0].embedding
    np.testing.assert_array_equal(np.array(plain, np.float32), vectors[0])
    ids = tiny.post("/tokenize", {"prompt": "hello"}).json()["tokens"]
    for given in (ids, [ids]):
        again = tiny.post("/v1/embeddings", {"input": given, "encoding_format": "base64"}).json()
        np.testing.assert_array_equal(unpacked(again["data"][0]["embedding"]), vectors[0])


@pytest.mark.parametrize("pooling", ["last", "mean", "cls"])
def test_a_request_may_say_how_to_pool(tiny: Server, pooling: str) -> None:
    body = {"input": ["some text", "other text"], "pooling": pooling, "normalize": False}
    cold, warm = (tiny.post("/v1/embeddings", body).json()["data"] for _ in range(2))
    assert cold == warm
    assert abs(np.linalg.norm(cold[0]["embedding"]) - 1) > 0.01
    if pooling == "cls":
        assert np.linalg.norm(tiny.post("/v1/embeddings", {**body, "input": "some"}).json()["data"][0]["embedding"]) > 0


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({}, "input", "required"),
        ({"input": []}, "input", "empty"),
        ({"input": ""}, "input", "no token"),
        ({"input": ["a", 1]}, "input", "only"),
        ({"input": ["a"] * 2049}, "input", "at most 2048"),
        ({"input": "a", "encoding_format": "int8"}, "encoding_format", "float or base64"),
        ({"input": "a", "pooling": "max"}, "pooling", "last, mean, cls"),
        ({"input": "a", "dimensions": 8}, "dimensions", "not made for embeddings"),
        ({"input": "a", "dimensions": 65}, "dimensions", "from 1 to 64"),
        ({"input": "a", "priority": 1}, "priority", "--policy priority"),
        ({"input": "a " * 3000}, "input", "the context holds 1024"),
        ({"input": "a", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "above 0, or -1"),
        ({"input": "a", "model": "other"}, "model", "this server has"),
    ],
)
def test_what_is_refused(tiny: Server, body: dict[str, Any], param: str, words: str) -> None:
    answer = tiny.post("/v1/embeddings", body)
    error = answer.json()["error"]
    assert answer.status_code in (400, 404) and error["param"] == param and words in error["message"], error


def test_long_texts_are_cut_where_that_is_asked_for(tiny: Server) -> None:
    cut = tiny.post("/v1/embeddings", {"input": "a " * 3000, "truncate_prompt_tokens": -1}).json()
    assert cut["usage"]["prompt_tokens"] == 1024
    few = tiny.post("/v1/embeddings", {"input": "a b c d e f", "truncate_prompt_tokens": 3}).json()
    assert few["usage"]["prompt_tokens"] == 3


def test_ollama(tiny: Server) -> None:
    answer = tiny.post("/api/embed", {"model": "tiny:latest", "input": ["hello", "world"], "keep_alive": "5m"}).json()
    want = tiny.post("/v1/embeddings", {"input": ["hello", "world"]}).json()
    assert answer["embeddings"] == [one["embedding"] for one in want["data"]]
    assert answer["prompt_eval_count"] == want["usage"]["prompt_tokens"] and answer["total_duration"] >= 0
    old = tiny.post("/api/embeddings", {"model": "tiny", "prompt": "hello"}).json()
    assert old == {"embedding": answer["embeddings"][0]}
    assert tiny.post("/api/embed", {"model": "tiny", "input": []}).json()["embeddings"] == []
    assert tiny.post("/api/embed", {"model": "tiny", "input": "a " * 3000}).json()["prompt_eval_count"] == 1024
    refused = tiny.post("/api/embed", {"model": "tiny", "input": "a " * 3000, "truncate": False})
    assert refused.status_code == 400 and "context" in refused.json()["error"]
    assert tiny.post("/api/show", {"model": "tiny"}).json()["capabilities"] == ["completion"]


def test_embeddings_are_billed_counted_and_leave_nothing(tiny: Server) -> None:
    before = tiny.wait_idle()
    answer = tiny.post("/v1/embeddings", {"input": ["one text", "two"]}, headers={"x-headway-receipt": "1"})
    receipt = answer.json()["usage"]["receipt"]
    assert receipt["prefill_ms"] > 0 and not receipt["decode_ms"]
    after = tiny.wait_idle()
    gained = {name: value - before.get(name, 0) for name, value in after.items() if value != before.get(name, 0)}
    assert any("finished" in name or "success" in name for name in gained), gained


@pytest.mark.parametrize("path", ["/v1/rerank", "/rerank", "/v1/score"])
def test_a_model_without_a_head_ranks_nothing(tiny: Server, path: str) -> None:
    body = {"text_1": "a", "text_2": "b"} if "score" in path else {"query": "a", "documents": ["b"]}
    answer = tiny.post(path, {"model": "tiny", **body})
    assert answer.status_code == 400
    assert answer.json()["error"]["message"] == "model: it has no classification head to score with"


@pytest.fixture(scope="module")
def ranker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A model that was made to rank: a head of one label, and no output matrix."""
    folder: Path = tmp_path_factory.mktemp("ranker")
    write_tiny_checkpoint(folder)
    tensors = load_file(folder / "model.safetensors")
    del tensors["lm_head.weight"]
    tensors["score.weight"] = np.random.default_rng(1).normal(0, 0.3, (1, 64)).astype(np.float32)
    save_file(tensors, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "architectures": ["LlamaForSequenceClassification"]}))
    server = Server(command=[*SERVE, str(folder), "--served-model-name", "ranker"])
    yield server
    server.kill()


def test_rerank_and_score(ranker: Server) -> None:
    documents = ["a first one", "another", "and a third"]
    answer = ranker.post("/v1/rerank", {"model": "ranker", "query": "what?", "documents": documents}).json()
    scores = [one["relevance_score"] for one in answer["results"]]
    assert scores == sorted(scores, reverse=True) and all(0 < score < 1 for score in scores)
    assert sorted(one["index"] for one in answer["results"]) == [0, 1, 2]
    assert all(one["document"]["text"] == documents[one["index"]] for one in answer["results"])
    body = {"query": "what?", "documents": [{"text": text} for text in documents], "top_n": 1}
    top = ranker.post("/rerank", {**body, "return_documents": False}).json()["results"]
    assert top == [{"index": answer["results"][0]["index"], "relevance_score": scores[0]}]
    listed = ranker.post("/v1/score", {"text_1": "what?", "text_2": documents}).json()
    by_index = {one["index"]: one["relevance_score"] for one in answer["results"]}
    assert {one["index"]: one["score"] for one in listed["data"]} == by_index and listed["usage"]["total_tokens"] > 3
    odd = ranker.post("/v1/score", {"text_1": ["a", "b"], "text_2": documents})
    assert odd.status_code == 400 and odd.json()["error"]["param"] == "text_2"


def test_a_ranker_neither_talks_nor_embeds(ranker: Server) -> None:
    chat = ranker.post("/v1/completions", {"prompt": "a", "max_tokens": 1})
    assert chat.status_code == 400 and "cannot generate text" in chat.json()["error"]["message"]
    assert "made for scores" in ranker.post("/v1/embeddings", {"input": "a"}).json()["error"]["message"]
    assert ranker.post("/api/show", {"model": "ranker"}).json()["capabilities"] == []


def test_limits_count_embeddings(start: Callable[..., Server]) -> None:
    server = start(input_tokens_per_minute=100)
    assert server.post("/v1/embeddings", {"input": "x" * 60}).status_code == 200
    refused = server.post("/v1/embeddings", {"input": "x" * 60})
    assert refused.status_code == 429 and int(refused.headers["retry-after"]) > 0
