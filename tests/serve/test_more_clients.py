"""Heavier clients, unmodified, against the running server with the built-in model: litellm, instructor, lm-eval.

They bring many packages, so they may live in an environment of their own: `pip install 'headway[clients]'` there, and
HEADWAY_CLIENTS_PYTHON names its Python. Each test runs a script in it, and is skipped where it lacks the client.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from langchain_openai import OpenAIEmbeddings
from ollama import Client

from tests.serve.conftest import Server, write_tiny_checkpoint

PYTHON = os.environ.get("HEADWAY_CLIENTS_PYTHON", sys.executable)


def run(client: str, script: str, *arguments: str) -> Any:
    """The JSON that a script prints as its last line; URL and further arguments are its argv."""
    found = subprocess.run([PYTHON, "-c", f"import {client}"], capture_output=True, check=False, timeout=120)
    if found.returncode:
        pytest.skip(f"{client} is not installed; pip install 'headway[clients]', or set HEADWAY_CLIENTS_PYTHON")
    quiet = {**os.environ, "LITELLM_LOCAL_MODEL_COST_MAP": "True", "HF_HUB_OFFLINE": "1", "DO_NOT_TRACK": "1"}
    done = subprocess.run(
        [PYTHON, "-c", f"import sys, json\n{script}", *arguments],
        capture_output=True, text=True, check=False, timeout=300, env=quiet,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.strip().splitlines()[-1])


LITELLM = """
import litellm
url, ask = sys.argv[1], [{"role": "user", "content": "Say hello."}]
found = {}
for provider, base in (("openai", url + "/v1"), ("hosted_vllm", url + "/v1"), ("ollama_chat", url), ("anthropic", url)):
    given = dict(model=f"{provider}/demo", api_base=base, api_key="unused", messages=ask, max_tokens=12, temperature=0)
    whole = litellm.completion(**given)
    chunks = list(litellm.completion(**given, stream=True, stream_options={"include_usage": True}))
    streamed = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    found[provider] = [whole.choices[0].message.content, streamed, whole.usage.completion_tokens]
given = dict(model="openai/demo", api_base=url + "/v1", api_key="unused")
vectors = litellm.embedding(**given, input=["one", "two"])
found["widths"] = [len(one["embedding"]) for one in vectors.data]
found["text"] = litellm.text_completion(**given, prompt="One, two,", max_tokens=4, temperature=0).choices[0].text
print(json.dumps(found))
"""


def test_litellm(demo: Server) -> None:
    found = run("litellm", LITELLM, demo.url)
    assert found["widths"] == [576, 576] and found["text"]
    answers = {provider: found[provider] for provider in ("openai", "hosted_vllm", "ollama_chat", "anthropic")}
    assert all(whole == streamed and tokens for whole, streamed, tokens in answers.values()), answers
    assert len({whole for whole, _, _ in answers.values()}) == 1, answers


INSTRUCTOR = """
import instructor, openai
from pydantic import BaseModel, ConfigDict, Field
class Person(BaseModel):
    model_config = ConfigDict(extra="forbid")  # a small model would add properties until it is cut
    name: str = Field(max_length=30)  # a small model might never end it
    age: int = Field(ge=0, le=150)
found = {}
for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA):
    client = instructor.from_openai(openai.OpenAI(base_url=sys.argv[1] + "/v1", api_key="unused"), mode=mode)
    person = client.chat.completions.create(
        model="demo", response_model=Person, max_tokens=120, temperature=0, max_retries=3,
        messages=[{"role": "user", "content": "Ada is 36 years old. Who is she?"}])
    found[mode.value] = [type(person.name).__name__, type(person.age).__name__]
print(json.dumps(found))
"""


def test_instructor(demo: Server) -> None:
    found = run("instructor", INSTRUCTOR, demo.url)
    assert len(found) == 2 and all(kinds == ["str", "int"] for kinds in found.values()), found


LM_EVAL = """
from lm_eval.api.instance import Instance
from lm_eval.models.openai_completions import LocalCompletionsAPI
model = LocalCompletionsAPI(
    model="tiny", base_url=sys.argv[1] + "/v1/completions", tokenizer=sys.argv[2], tokenizer_backend="huggingface",
    tokenized_requests=sys.argv[3] == "ids", max_length=512, num_concurrent=1, batch_size=2)
pairs = [("The sky is", " blue"), ("The sky is", " made of stone"), ("", "Hello")]
likely = model.loglikelihood([Instance("loglikelihood", {}, pair, i) for i, pair in enumerate(pairs)])
ask = Instance("generate_until", {}, ("Once upon", {"until": ["q"], "max_gen_toks": 8, "temperature": 0}), 0)
print(json.dumps({"likely": likely, "text": model.generate_until([ask])}))
"""


@pytest.mark.parametrize("how", ["ids", "text"])
def test_lm_eval(tmp_path: Path, how: str) -> None:
    write_tiny_checkpoint(tmp_path)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    config |= {"tokenizer_class": "PreTrainedTokenizerFast", "pad_token": "<|im_end|>", "bos_token": "<|im_end|>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    command = [sys.executable, "-m", "headway", "serve", str(tmp_path), "--port", "0", "--kv-cache-gib", "0.01"]
    server = Server(command=[*command, "--served-model-name", "tiny"])
    try:
        found = run("lm_eval", LM_EVAL, server.url, str(tmp_path), how)
        assert len(found["likely"]) == 3 and all(total < 0 for total, _ in found["likely"])
        whole = server.post(
            "/v1/completions", {"prompt": "The sky is blue", "max_tokens": 1, "prompt_logprobs": 0}
        ).json()
        count = server.post("/tokenize", {"prompt": "The sky is"}).json()["count"]
        ours = [next(iter(one.values()))["logprob"] for one in whole["choices"][0]["prompt_logprobs"][count:]]
        assert found["likely"][0][0] == pytest.approx(sum(ours), abs=1e-3)
        assert len(found["text"]) == 1
    finally:
        server.kill()


def test_langchain_embeds(demo: Server) -> None:
    embed = OpenAIEmbeddings(
        model="demo", base_url=f"{demo.url}/v1", api_key="unused", check_embedding_ctx_length=False
    )  # type: ignore[call-arg, arg-type]
    vectors = embed.embed_documents(["one", "two"])
    assert [len(vector) for vector in vectors] == [576, 576] and vectors[0] == embed.embed_query("one")


def test_ollama_embeds_and_shows(demo: Server) -> None:
    client = Client(host=demo.url)
    answer = client.embed(model="demo", input=["one", "two"])
    assert [len(vector) for vector in answer.embeddings] == [576, 576] and answer.prompt_eval_count
    assert list(client.embeddings(model="demo", prompt="one").embedding) == list(answer.embeddings[0])
    assert client.show("demo").capabilities == ["completion"]
