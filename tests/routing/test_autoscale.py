"""How many replicas there should be, from what a router knows, in virtual time."""

from __future__ import annotations

import pytest

from headway.core.clock import to_ps
from headway.core.errors import BadInput
from headway.routing.autoscale import Autoscale, Autoscaler
from headway.routing.policies import routing_named
from headway.routing.replica import per_token
from headway.routing.request import RoutedRequest
from headway.routing.router import RequestRouter

GOAL = Autoscale(least=1, most=8, ttft=1.0, up_after=2.0, down_after=60.0)


def router(replicas: int, most: int | None = None) -> RequestRouter:
    """Replicas that compute 1,000 prompt tokens a second."""
    one = RequestRouter(routing_named("least-loaded"), heartbeat=None)
    one.awaited = True
    for number in range(replicas):
        one.join(str(number), per_token(0.001), most=most)
    return one


def send(one: RequestRouter, requests: int, tokens: int = 1000, now: int = 0) -> None:
    for number in range(requests):
        one.offer(RoutedRequest(f"{now} {number}", tokens, arrival=now))
    one.dispatch(now)


def asked(scaler: Autoscaler, one: RequestRouter, seconds: list[float], starting: int = 0) -> list[int]:
    return [scaler.wanted(one, starting, to_ps(at)) for at in seconds]


@pytest.mark.parametrize(
    ("replicas", "requests", "wanted"),
    [
        (2, 0, [2, 2, 2, 2]),
        (2, 1, [2, 2, 2, 2]),  # half a second of work each
        (2, 6, [2, 2, 2, 4]),  # three seconds each, after two seconds: twice as many at most
        (4, 6, [4, 4, 4, 6]),  # one and a half
        (6, 100, [6, 6, 6, 8]),  # never more than the most
        (8, 100, [8, 8, 8, 8]),
    ],
)
def test_more_start_when_a_newcomer_would_wait_too_long_for_long_enough(
    replicas: int, requests: int, wanted: list[int]
) -> None:
    one = router(replicas)
    send(one, requests)
    for replica in one.replicas.values():  # its work does not shrink while nothing is heard of it
        replica.queue_seconds = lambda now, total=requests / replicas: total  # type: ignore[method-assign]
    assert asked(Autoscaler(GOAL), one, [0, 1, 1.9, 2]) == wanted


def test_a_queue_at_the_router_counts_by_its_age_unless_somebody_is_on_the_way() -> None:
    one = router(1, most=1)
    send(one, 3, tokens=10)
    assert one.waiting == 2
    assert asked(Autoscaler(GOAL), one, [0, 2, 3.9]) == [1, 1, 1]
    assert asked(Autoscaler(GOAL), one, [4, 6]) == [1, 2]
    assert asked(Autoscaler(GOAL), one, [4, 6], starting=1) == [2, 2]


def test_one_ends_when_fewer_have_been_enough_for_long() -> None:
    scaler = Autoscaler(GOAL)
    assert asked(scaler, router(3), [0, 59, 60, 61, 119, 121]) == [3, 3, 2, 3, 3, 2]
    assert asked(Autoscaler(GOAL), router(1), [0, 100, 200]) == [1, 1, 1]


def test_none_ends_while_its_requests_would_not_fit_elsewhere() -> None:
    one = router(2, most=4)
    send(one, 5, tokens=1)
    assert asked(Autoscaler(GOAL), one, [0, 60, 120]) == [2, 2, 2]
    for id in list(one.live)[:3]:
        one.end(id, 0)
    assert asked(Autoscaler(GOAL), one, [0, 60]) == [2, 1]


def test_to_zero_and_back() -> None:
    scaler, one = Autoscaler(Autoscale(least=0, most=4, down_after=10.0)), router(1)
    assert asked(scaler, one, [0, 10]) == [1, 0]
    one.leave("0")
    assert asked(scaler, one, [11]) == [0]
    send(one, 5)
    assert one.waiting == 5
    assert asked(scaler, one, [12]) == [1]
    assert asked(scaler, one, [13], starting=1) == [1]


def test_at_least_the_least() -> None:
    assert asked(Autoscaler(Autoscale(least=3, most=4)), router(1), [0]) == [3]
    with pytest.raises(BadInput, match="5 is above most, 4"):
        Autoscale(least=5, most=4)
