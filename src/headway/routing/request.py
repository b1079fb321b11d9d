"""What is routed: a request as the router sees it."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec


class RoutedRequest(msgspec.Struct, gc=False):
    """One request, from its arrival at the router to its end.

    Attributes:
        id: unique among live requests.
        tokens: of its prompt, as well as the router knows.
        names: of the prompt's full blocks before its last token, each standing for the whole prefix; () where the
            policy does not look at them. block_tokens: tokens of one.
        session: requests of one session belong together; "" = it has none.
        deadline: when it is no longer wanted if it has not been placed, ps; None = never.
        replica: name of the one that has it; "" = it waits at the router.
        begun: its client has got the first token: it cannot be tried elsewhere any more.
        tried: replicas that have failed it.
        arrival: when it came, ps; None = nobody said.
        splits: its prompt may be computed by another replica than the one that answers.
        cached: tokens of its prompt that are known at the replica that has it.
    """

    id: str
    tokens: int
    names: Sequence[bytes] = ()
    block_tokens: int = 0
    session: str = ""
    deadline: int | None = None
    replica: str = ""
    begun: bool = False
    tried: tuple[str, ...] = ()
    arrival: int | None = None
    splits: bool = False
    cached: int = 0
