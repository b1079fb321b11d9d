"""Queue, retries, draining, health; and under any course of events no request is lost."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.core.clock import to_ps
from headway.core.errors import BadInput, Rejected
from headway.routing.policies import ROUTING, routing_named
from headway.routing.replica import per_token
from headway.routing.request import RoutedRequest
from headway.routing.router import RequestRouter

SECOND = to_ps(1.0)


def router(
    replicas: int = 2, most: int | None = 1, policy: str = "least-loaded", most_waiting: int = 100
) -> RequestRouter:
    made = RequestRouter(routing_named(policy), most_waiting=most_waiting, heartbeat=5 * SECOND)
    for number in range(replicas):
        made.join(f"r{number}", per_token(0.001), most=most)
    return made


def placed(made: RequestRouter, now: int = 0) -> list[tuple[str, str]]:
    return [(one.request.id, one.replica.name) for one in made.dispatch(now)]


def offered(made: RequestRouter, *ids: str) -> None:
    for id in ids:
        made.offer(RoutedRequest(id, 10))


def test_who_finds_all_full_waits_at_the_router_in_order() -> None:
    made = router()
    offered(made, *"abcd")
    assert placed(made) == [("a", "r0"), ("b", "r1")]
    assert made.waiting == 2 and placed(made) == []
    made.end("b", 0)
    assert placed(made) == [("c", "r1")]
    made.end("d", 0)  # its client has gone
    made.end("a", 0)
    assert placed(made) == [] and made.waiting == 0


def test_so_many_wait_and_no_more() -> None:
    made = router(1, most_waiting=2)
    offered(made, "a")
    placed(made)
    offered(made, "b", "c")
    with pytest.raises(Rejected, match="2 requests wait at the router already"):
        offered(made, "d")
    assert set(made.live) == set("abc")


def test_who_has_waited_past_its_deadline_is_over() -> None:
    made = router(1)
    offered(made, "a")
    placed(made)
    made.offer(RoutedRequest("soon", 10, deadline=SECOND))
    made.offer(RoutedRequest("later", 10, deadline=2 * SECOND))
    made.offer(RoutedRequest("patient", 10))
    assert made.next_deadline == SECOND and made.expired(SECOND - 1) == []
    assert [one.id for one in made.expired(SECOND)] == ["soon"]
    made.end("a", SECOND)
    assert placed(made, SECOND) == [("later", "r0")]
    assert made.expired(9 * SECOND) == [], "who has been placed waits no more"


def test_a_failure_before_the_first_token_is_tried_elsewhere_and_first() -> None:
    made = router(3)
    offered(made, *"abcd")
    placed(made)
    assert made.fail("b", 0)
    assert placed(made) == [("d", "r1")], "never twice at the same replica: the next one has its place"
    made.end("a", 0)
    assert placed(made) == [("b", "r0")]
    offered(made, "e")
    assert made.fail("b", 0)
    made.end("c", 0)
    assert placed(made) == [("b", "r2"), ("e", "r0")]
    assert not made.fail("b", 0), "it has been at all of them"
    assert "b" not in made.live


def test_a_failure_after_the_first_token_is_the_clients_to_hear() -> None:
    made = router()
    offered(made, "a")
    placed(made)
    made.begin("a", 0)
    assert not made.fail("a", 0)
    assert not made.live and not made.replicas["r0"].requests


def test_draining_takes_nothing_new_and_loses_nothing() -> None:
    made = router(2, most=None)
    offered(made, *"ab")
    placed(made)
    made.drain("r0")
    offered(made, *"cde")
    assert {name for _, name in placed(made)} == {"r1"}
    assert not made.drained("r0") and "a" in made.replicas["r0"].requests
    made.end("a", 0)
    assert made.drained("r0")
    made.drain("r0", False)
    offered(made, "f")
    assert placed(made) == [("f", "r0")]
    with pytest.raises(BadInput, match="'r9' is not one of r0, r1"):
        made.drain("r9")


def test_who_falls_silent_is_dead_until_it_is_heard_of_again() -> None:
    made = router(2)
    made.stored("r0", [b"name"])
    made.heard("r1", 3 * SECOND)
    assert made.check(4 * SECOND) == []
    assert made.check(6 * SECOND) == ["r0"] and made.check(7 * SECOND) == []
    assert made.index.count(0) == 0, "its cache is gone with it"
    offered(made, "a", "b")
    assert placed(made) == [("a", "r1")]
    made.heard("r0", 8 * SECOND)
    assert placed(made) == [("b", "r0")]


def test_where_none_is_up_nobody_is_let_in_and_nobody_waits_for_ever() -> None:
    made = router(1)
    offered(made, "a", "b")
    placed(made)
    made.lose("r0")
    with pytest.raises(Rejected, match="no replica is up"):
        offered(made, "c")
    assert not made.fail("a", 0)
    assert [one.id for one in made.expired(0)] == ["b"] and not made.live


def test_a_router_that_begins_anew_learns_what_its_replicas_have() -> None:
    made = router(2, most=4)
    made.heard("r0", 0, others=3)
    assert made.replicas["r0"].load == 3
    offered(made, "a", "b", "c")
    assert placed(made) == [("a", "r1"), ("b", "r1"), ("c", "r1")]
    made.heard("r0", 0, others=0)
    assert made.replicas["r0"].load == 0


OPS = st.lists(
    st.tuples(
        st.sampled_from(["offer", "offer", "begin", "end", "fail", "drain", "open", "lose", "heard", "expire"]),
        st.integers(0, 30),
    ),
    max_size=120,
)


@settings(max_examples=150, deadline=None)
@given(policy=st.sampled_from(sorted(ROUTING)), most=st.none() | st.integers(1, 3), replicas=st.integers(1, 4), ops=OPS)
def test_no_request_is_lost(policy: str, most: int | None, replicas: int, ops: list[tuple[str, int]]) -> None:
    """Each is in exactly one place, until it is answered, refused, or its client is told; nobody has more than may be;
    and who waits while there is room has failed at all that have it."""
    made = router(replicas, most, policy, most_waiting=12)
    begun: set[str] = set()
    now = 0
    for step, (what, number) in enumerate(ops):
        now += SECOND // 4
        name, live = f"r{number % replicas}", sorted(made.live)
        id = live[number % len(live)] if live else ""
        at_replica = bool(id) and made.live[id].replica != ""
        if what == "offer":
            try:
                deadline = now + 2 * SECOND if number % 3 == 0 else None
                made.offer(RoutedRequest(str(step), 40, [bytes([number])], 32, f"s{number}", deadline))
            except Rejected:
                assert str(step) not in made.live
        elif what == "begin" and at_replica:
            made.begin(id, now)
            begun.add(id)
        elif what == "end" and id:
            made.end(id, now)
            assert id not in made.live
        elif what == "fail" and at_replica:
            assert made.fail(id, now) == (id in made.live)
            assert not (id in made.live and id in begun)
        elif what in ("drain", "open"):
            made.drain(name, what == "drain")
        elif what == "lose":
            made.lose(name)
        elif what == "heard":
            made.heard(name, now)
        for one in made.expired(now):
            assert one.id not in made.live
        for request, replica in made.dispatch(now):
            assert replica.open and replica.name not in request.tried
        places = [id for replica in made.replicas.values() for id in replica.requests]
        waiting = [id for id, one in made.live.items() if not one.replica]
        assert sorted([*places, *waiting]) == sorted(made.live) and len(waiting) == made.waiting
        for replica in made.replicas.values():
            assert most is None or replica.load <= most
            assert bool(replica.queue_seconds(now)) <= any(id not in begun for id in replica.requests)
            if replica.has_room:
                assert all(replica.name in made.live[id].tried for id in waiting)
    for id in list(made.live):
        made.end(id, now)
    assert not any(replica.load for replica in made.replicas.values())
