"""A router before two real servers: answers pass unchanged, failures are tried elsewhere or told."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import openai
import pytest

from tests.route.conftest import SLOW, Routed
from tests.serve.conftest import Server, events

Start = Callable[..., Routed]
SAY = {"model": "scripted", "messages": [{"role": "user", "content": "say:hello there"}], "max_tokens": 64}
COUNT = {"model": "scripted", "messages": [{"role": "user", "content": "count"}], "max_tokens": 400, "stream": True}
LONG = {**COUNT, "max_tokens": 4000}


def lines(response: httpx.Response) -> Iterator[str]:
    return (line for line in response.iter_lines() if line)


def test_answers_pass_unchanged(routed: Start) -> None:
    one = routed()
    direct = one.servers[0].post("/v1/chat/completions", SAY).json()
    through = httpx.post(one.url + "/v1/chat/completions", json=SAY, headers={"x-request-id": "mine"})
    assert through.status_code == 200 and through.headers["x-request-id"] == "mine"
    assert through.json()["choices"] == direct["choices"]
    assert httpx.get(one.url + "/v1/models").json()["data"][0]["id"] == "scripted"
    stream = httpx.post(one.url + "/v1/chat/completions", json={**SAY, "stream": True})
    assert stream.headers["content-type"].startswith("text/event-stream")
    text = "".join(event["choices"][0]["delta"].get("content") or "" for event in events(stream))
    assert text == direct["choices"][0]["message"]["content"]


def test_top_says_that_it_is_no_server(routed: Start) -> None:
    url = routed(1).url
    command = [sys.executable, "-m", "headway", "top", "--url", url, "--once"]
    shown = subprocess.run(command, capture_output=True, text=True)
    assert shown.returncode == 2 and f"{url} is a router" in shown.stderr


def test_openais_own_client_cannot_tell(routed: Start) -> None:
    one = routed()
    client = openai.OpenAI(base_url=one.url + "/v1", api_key="none", max_retries=0)
    assert [model.id for model in client.models.list()] == ["scripted"]
    answer = client.chat.completions.create(**SAY)
    assert answer.choices[0].message.content == "hello there" and answer.usage is not None
    parts = client.chat.completions.create(**{**SAY, "stream": True})
    assert "".join(part.choices[0].delta.content or "" for part in parts if part.choices) == "hello there"
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(**{**SAY, "temperature": -1})
    assert caught.value.param == "temperature", "what is wrong with a request, its replica says"
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(**{**SAY, "model": "another"})


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"model": "scripted", "prompt": "say:yes", "max_tokens": 9}),
        ("/v1/messages", {"model": "scripted", "messages": SAY["messages"], "max_tokens": 30}),
        ("/api/chat", {"model": "scripted", "messages": SAY["messages"], "stream": False}),
        ("/v1/responses", {"model": "scripted", "input": "say:yes"}),
    ],
)
def test_every_dialect_passes(routed: Start, path: str, body: dict) -> None:
    one = routed()
    answer = httpx.post(one.url + path, json=body)
    assert answer.status_code == 200 and ("yes" in answer.text or "hello there" in answer.text)


def test_a_conversation_goes_where_its_beginning_is_cached(routed: Start) -> None:
    one = routed()
    said = [{"role": "user", "content": "say:a " + "long beginning " * 60}]
    for turn in range(5):
        body = {**SAY, "messages": said, "max_tokens": 8}
        answer = httpx.post(one.url + "/v1/chat/completions", json=body).json()
        cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert turn == 0 or cached > 700
        said = [*said, {"role": "assistant", "content": "well"}, {"role": "user", "content": f"say:{turn}"}]
        other = [{"role": "user", "content": f"say:{turn}"}]
        httpx.post(one.url + "/v1/chat/completions", json={**SAY, "messages": other})


def test_killed_before_the_first_token_another_one_answers(routed: Start) -> None:
    one = routed(2, "--policy", "round-robin", server={"engine": {"seconds": 3.0}})
    found: list[httpx.Response] = []
    ask = threading.Thread(
        target=lambda: found.append(
            httpx.post(one.url + "/v1/chat/completions", json={**SAY, "max_tokens": 2}, timeout=60)
        )
    )
    ask.start()
    one.servers[one.holder()].kill()
    ask.join()
    assert found[0].status_code == 200 and found[0].json()["choices"][0]["message"]["content"] == "he"
    metrics = httpx.get(one.url + "/metrics").text
    assert (
        sum(float(line.split()[-1]) for line in metrics.splitlines() if line.startswith("headway:router_retried")) == 1
    )


def test_killed_in_the_middle_of_a_stream_the_client_is_told(routed: Start) -> None:
    one = routed(server=SLOW)
    with httpx.stream("POST", one.url + "/v1/chat/completions", json=LONG, timeout=60) as response:
        stream = lines(response)
        for _ in range(5):
            next(stream)
        one.servers[one.holder()].kill()
        rest = list(stream)
    assert "data: [DONE]" not in rest
    error = json.loads(rest[-1].removeprefix("data: "))["error"]
    assert error["code"] == "replica_failed" and "in the middle of the answer" in error["message"]
    assert httpx.post(one.url + "/v1/chat/completions", json=SAY).status_code == 200, "the other one goes on"


def test_killed_in_the_middle_of_a_whole_answer_nobody_takes_it_for_complete(routed: Start) -> None:
    one = routed(1, server={"engine": {"seconds": 3.0}})
    found: list[int] = []
    ask = threading.Thread(
        target=lambda: found.append(httpx.post(one.url + "/v1/chat/completions", json=SAY, timeout=60).status_code)
    )
    ask.start()
    one.servers[one.holder()].kill()
    ask.join()
    assert found == [502]
    while (answer := httpx.post(one.url + "/v1/chat/completions", json=SAY)).status_code == 502:
        assert "cannot be reached" in answer.json()["error"]["message"]
    answer = httpx.post(one.url + "/v1/chat/completions", json=SAY)
    assert answer.status_code == 503 and answer.headers["retry-after"] == "5"
    assert answer.json()["error"]["message"] == "no replica is up"


@pytest.mark.parametrize("how", ["router", "replica"])
def test_draining_loses_no_stream_and_takes_nothing_new(routed: Start, how: str) -> None:
    one = routed(server={**SLOW, "shutdown_timeout": 60})
    with httpx.stream("POST", one.url + "/v1/chat/completions", json=COUNT, timeout=60) as response:
        stream = lines(response)
        next(stream)
        holder = one.holder()
        if how == "router":
            asked = {"replica": one.servers[holder].url}
            assert httpx.post(one.url + "/replicas/drain", json=asked).json()["replicas"][holder]["draining"]
        else:
            one.servers[holder].process.terminate()
        for _ in range(4):
            assert httpx.post(one.url + "/v1/chat/completions", json={**SAY, "max_tokens": 1}).status_code == 200
        assert one.about()[holder]["requests"] == 1
        assert list(stream)[-1] == "data: [DONE]"
    if how == "router":
        one.wait(lambda about: about[holder]["drained"])
        httpx.post(one.url + "/replicas/drain", json={**asked, "draining": False})
        assert not one.about()[holder]["draining"]


def test_a_client_that_leaves_costs_its_replica_nothing_more(routed: Start) -> None:
    one = routed(server=SLOW)
    with httpx.stream("POST", one.url + "/v1/chat/completions", json=LONG, timeout=60) as response:
        stream = lines(response)  # kept: its end would be that of the connection
        next(stream)
    one.wait(lambda about: not any(replica["requests"] for replica in about))
    for server in one.servers:
        server.wait_idle(10.0)


def test_who_finds_all_full_waits_at_the_router_and_not_past_its_deadline(routed: Start) -> None:
    one = routed(1, "--most-in-flight", "1", "--max-waiting", "1", server=SLOW)
    with httpx.stream("POST", one.url + "/v1/chat/completions", json=LONG, timeout=60) as response:
        stream = lines(response)  # kept: its end would be that of the connection
        next(stream)
        late = httpx.post(one.url + "/v1/chat/completions", json=SAY, headers={"x-request-timeout": "0.3"}, timeout=60)
        assert late.status_code == 503 and late.json()["error"]["code"] == "deadline_exceeded"
        found: list[int] = []
        ask = threading.Thread(
            target=lambda: found.append(httpx.post(one.url + "/v1/chat/completions", json=SAY, timeout=60).status_code)
        )
        ask.start()
        while httpx.get(one.url + "/replicas").json()["waiting"] != 1:
            time.sleep(0.02)
        full = httpx.post(one.url + "/v1/chat/completions", json=SAY)
        assert full.status_code == 503 and full.json()["error"]["code"] == "queue_full"
    ask.join()
    assert found == [200]


def test_a_router_that_is_started_again_goes_on(routed: Start) -> None:
    one = routed(server=SLOW)
    with httpx.stream("POST", one.servers[0].url + "/v1/chat/completions", json=LONG, timeout=60) as response:
        stream = lines(response)  # kept: its end would be that of the connection
        next(stream)
        one.router.kill()
        again = Routed(one.servers)
        try:
            again.wait(lambda about: about[0]["others"] == 1)
            assert httpx.post(again.url + "/v1/chat/completions", json=SAY).status_code == 200
            assert again.router.stop() == 0
        finally:
            again.router.kill()


def test_keys_are_asked_for_and_passed_on(routed: Start, tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("secret\n")
    made: list[Server] = [Server({"api_key_file": str(file)})]
    Routed.headers, before = {"authorization": "Bearer secret"}, Routed.headers
    try:
        one = Routed(made, "--api-key-file", str(file))
        made.append(one.router)
        url = one.url + "/v1/chat/completions"
        assert httpx.post(url, json=SAY).status_code == 401
        assert httpx.post(url, json=SAY, headers=Routed.headers).status_code == 200
        assert httpx.post(one.url + "/replicas/drain", json={"replica": made[0].url}).status_code == 401
        assert httpx.get(one.url + "/health").status_code == 200
    finally:
        Routed.headers = before
        for server in made:
            server.kill()


@pytest.mark.parametrize(
    ("path", "body", "status", "says"),
    [
        ("/replicas/drain", {"replica": "http://nowhere"}, 400, "'http://nowhere' is not one of"),
        ("/replicas/drain", {"replica": 3}, 400, "Expected `str`"),
        ("/v1/load_lora_adapter", {}, 400, "ask each of them"),
        ("/v1/chat/completions", [[]], 400, ""),
        ("/v1/nowhere", {}, 404, "no such route"),
    ],
)
def test_what_cannot_be_is_refused(routed: Start, path: str, body: object, status: int, says: str) -> None:
    one = routed(1)
    answer = httpx.post(one.url + path, json=body)
    assert answer.status_code == status and says in answer.json()["error"]["message"]


def test_requests_a_minute_are_those_of_all_replicas_together(routed: Start) -> None:
    one = routed(2, "--requests-per-minute", "3", "--policy", "round-robin")
    answers = [httpx.post(one.url + "/v1/chat/completions", json=SAY) for _ in range(4)]
    assert [answer.status_code for answer in answers] == [200, 200, 200, 429]
    left = [answer.headers["x-ratelimit-remaining-requests"] for answer in answers[:3]]
    assert left == ["2", "1", "0"] and answers[0].headers["x-ratelimit-limit-requests"] == "3"
    assert answers[3].json()["error"]["code"] == "rate_limit_exceeded" and int(answers[3].headers["retry-after"]) >= 1
    assert httpx.get(one.url + "/v1/models").status_code == 200, "what takes no work does not count"


def test_requests_at_once_are_those_of_all_replicas_together_by_key(routed: Start, tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("sk-one concurrent=1\nsk-two\n")
    bare = tmp_path / "bare"  # the replicas know of no limit
    bare.write_text("sk-one\nsk-two\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Routed, "headers", {"authorization": "Bearer sk-two"})
        one = routed(
            2, "--api-key-file", str(file), "--policy", "round-robin", server={**SLOW, "api_key_file": str(bare)}
        )

    def ask(key: str) -> int:
        headers = {"authorization": f"Bearer {key}"}
        return httpx.post(one.url + "/v1/chat/completions", json=SAY, headers=headers).status_code

    first = {"authorization": "Bearer sk-one"}
    with httpx.stream("POST", one.url + "/v1/chat/completions", json=LONG, headers=first) as stream:
        parts = lines(stream)  # kept: without it the stream would be closed
        next(parts)
        assert [ask("sk-one"), ask("sk-two"), ask("sk-one")] == [429, 200, 429], "wherever it would go"
    end = time.monotonic() + 30
    while ask("sk-one") != 200:
        assert time.monotonic() < end, "a client that has left gives its place back"
        time.sleep(0.05)
