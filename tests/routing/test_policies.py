"""Who is chosen: by turn, by load, by session, by what a replica's cache holds."""

from __future__ import annotations

from collections import Counter

import pytest

from headway.cache.hashing import BlockHasher
from headway.core.clock import to_ps
from headway.core.errors import BadInput
from headway.routing.policies import ROUTING, routing_named
from headway.routing.replica import per_token
from headway.routing.request import RoutedRequest
from headway.routing.ring import HashRing
from headway.routing.router import RequestRouter

HASHER = BlockHasher(4, b"key")
ROOT = HASHER.root("", "")


def router(policy: str, replicas: int = 3, most: int | None = None, blocks: int = 1 << 10) -> RequestRouter:
    made = RequestRouter(routing_named(policy), heartbeat=None)
    for number in range(replicas):
        made.join(f"r{number}", per_token(0.001), most=most, blocks=blocks)
    return made


def prompt(id: str, tokens: list[int], **fields: str) -> RoutedRequest:
    return RoutedRequest(id, len(tokens), HASHER.chain(ROOT, tokens), HASHER.block_size, **fields)


def send(made: RequestRouter, request: RoutedRequest, now: int = 0) -> str:
    made.offer(request)
    (placed,) = made.dispatch(now)
    return placed.replica.name


def test_there_are_five_and_no_others() -> None:
    assert set(ROUTING) == {"prefix", "session", "least-loaded", "round-robin", "power-of-two"}
    with pytest.raises(BadInput, match="--policy: 'random' is not one of prefix, session"):
        routing_named("random")


@pytest.mark.parametrize(
    ("policy", "ended", "goes_to"),
    [
        ("round-robin", [], ["r0", "r1", "r2", "r0", "r1", "r2"]),
        ("round-robin", ["0", "1"], ["r0", "r1", "r2", "r0", "r1", "r2"]),
        ("least-loaded", [], ["r0", "r1", "r2", "r0", "r1", "r2"]),
        ("least-loaded", ["1"], ["r0", "r1", "r2", "r1", "r0", "r1"]),
    ],
)
def test_turns_and_loads(policy: str, ended: list[str], goes_to: list[str]) -> None:
    made, chosen = router(policy), []
    for number in range(6):
        if number == 3:
            for id in ended:
                made.end(id, 0)
        chosen.append(send(made, RoutedRequest(str(number), 10)))
    assert chosen == goes_to


def test_whose_turn_it_is_is_passed_over_where_it_is_full() -> None:
    made = router("round-robin", 3, most=1)
    assert [send(made, RoutedRequest(id, 1)) for id in "ab"] == ["r0", "r1"]
    made.end("a", 0)
    made.drain("r2")
    assert send(made, RoutedRequest("c", 1)) == "r0"


def test_a_prompt_goes_where_its_start_is_known() -> None:
    made = router("prefix")
    shared = list(range(400))
    home = send(made, prompt("a", [*shared, 1]))
    made.begin("a", to_ps(0.4))
    made.end("a", to_ps(0.4))
    for number in range(4):
        assert send(made, prompt(f"b{number}", [*shared, *range(1000 * number, 1000 * number + 40)])) == home


def test_a_known_start_is_not_worth_a_longer_wait() -> None:
    made = router("prefix")
    shared = list(range(40))
    home = send(made, prompt("a", [*shared, 1]))
    now = to_ps(0.041)
    made.begin("a", now)
    assert send(made, prompt("long", [*shared, *range(5000, 6000)]), now) == home  # a second of work
    assert send(made, prompt("c", [*shared, 2]), now) != home


def test_work_in_hand_gets_less_with_time() -> None:
    made = router("prefix", 1)
    send(made, RoutedRequest("a", 1000))
    send(made, RoutedRequest("b", 500))
    queue = made.replicas["r0"].queue_seconds
    assert queue(0) == pytest.approx(1.5)
    assert queue(to_ps(0.6)) == pytest.approx(0.9)
    assert queue(to_ps(3.0)) == pytest.approx(0.5), "the second one cannot have begun before the first one's token"


def test_a_slow_replica_is_found_out() -> None:
    made = router("prefix", 2)
    now = 0
    for number in range(20):
        name = send(made, RoutedRequest(f"{number}", 100), now)
        now += to_ps(0.5 if name == "r0" else 0.1)
        made.begin(f"{number}", now)
        made.end(f"{number}", now)
    assert made.replicas["r0"].pace > 1.5 and made.replicas["r1"].pace == pytest.approx(1.0)
    assert send(made, RoutedRequest("next", 100), now) == "r1"
    made.end("next", now)
    for _ in range(200):
        made.heard("r0", now)
    assert made.replicas["r0"].pace < 1.3, "who is idle gets another chance: it may have been a neighbour"


def test_nobody_gets_much_more_than_the_mean_load() -> None:
    made = router("prefix", 4)
    shared = list(range(4000))
    loads = Counter(send(made, prompt(str(number), [*shared, number])) for number in range(200))
    assert max(loads.values()) <= 2 * 200 / 4 + 5


def test_a_session_stays_where_it_is() -> None:
    made = router("session", 5)
    homes = {}
    for turn in range(4):
        for session in range(40):
            id = f"{turn}/{session}"
            home = send(made, RoutedRequest(id, 10, session=f"s{session}"))
            assert homes.setdefault(session, home) == home
            made.end(id, 0)
    assert set(homes.values()) == set(made.replicas)


def test_a_crowded_session_spills_over_in_bounds() -> None:
    made = router("session", 4)
    for number in range(100):
        send(made, RoutedRequest(str(number), 10, session="the same"))
    assert max(replica.load for replica in made.replicas.values()) <= 1.25 * 100 / 4 + 2


@pytest.mark.parametrize("count", [3, 8])
def test_the_ring_moves_few_keys(count: int) -> None:
    names = [f"replica-{number}" for number in range(count)]
    keys = [f"key {number}" for number in range(3000)]
    before, after = HashRing(names), HashRing([*names, "new"])
    homes = {key: next(before.walk(key)) for key in keys}
    moved = [key for key in keys if next(after.walk(key)) != homes[key]]
    assert all(next(after.walk(key)) == "new" for key in moved), "none goes from an old one to another"
    assert len(moved) < 1.6 * len(keys) / (count + 1)
    assert max(Counter(homes.values()).values()) < 1.5 * len(keys) / count
    assert sorted(before.walk("any")) == sorted(names)


def test_two_are_drawn_and_the_less_loaded_one_wins() -> None:
    made = router("power-of-two", 8)
    for number in range(800):
        send(made, RoutedRequest(str(number), 10))
    loads = [replica.load for replica in made.replicas.values()]
    assert max(loads) - min(loads) < 12
    assert send(router("power-of-two", 1), RoutedRequest("only", 1)) == "r0"
