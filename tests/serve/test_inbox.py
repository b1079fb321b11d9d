"""Who gets the outputs of a request: the task that waits in `take`, or the sink that spares waking it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from headway.core.errors import EngineDead
from headway.core.request import Finish, SamplingParams
from headway.engine.messages import Delta, Refusal, Submit
from headway.serve.link import Inbox

GAIN = Delta(id="a", choice=0, at=1, tokens=(5,), text="x")
END = Delta(id="a", choice=0, at=2, finish=Finish("stop"))
REFUSED = Refusal(id="a", status=400, code="bad", message="prompt: bad")


def inbox(sink: Callable[[list[Delta | Refusal]], bool] | None, n: int = 1) -> Inbox:
    one = Inbox([Submit(id="a", tokens=(1,), params=SamplingParams(n=n), arrival=0)])
    one.sink = sink
    return one


async def come(one: Inbox, *outputs: Delta | Refusal) -> asyncio.Task[list[Delta | Refusal]]:
    """A task waits in `take`; a turn brings `outputs`."""
    task = asyncio.create_task(one.take())
    await asyncio.sleep(0)
    for output in outputs:
        one.put(output)
    one.wake()
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    return task


@pytest.mark.parametrize(
    ("takes", "outputs", "sunk"),
    [
        (True, [GAIN], True),
        (True, [GAIN, GAIN], True),
        (False, [GAIN], False),  # the client does not keep up
        (True, [GAIN, END], False),
        (True, [END], False),
        (True, [REFUSED], False),
        (True, [], False),  # woken to look at the clock
    ],
)
def test_the_sink_takes_what_ends_nothing(takes: bool, outputs: list[Delta | Refusal], sunk: bool) -> None:
    async def run() -> None:
        seen: list[Delta | Refusal] = []

        def sink(given: list[Delta | Refusal]) -> bool:
            if takes:
                seen.extend(given)
            return takes

        one = inbox(sink)
        task = await come(one, *outputs)
        assert task.done() is not sunk
        if sunk:
            assert seen == outputs
            assert not one.waiting
            one.put(END)
            one.wake()
            assert await task == [END]
        else:
            assert seen == []
            assert await task == outputs

    asyncio.run(run())


def test_what_comes_while_the_task_is_busy_waits_for_it() -> None:
    async def run() -> None:
        one = inbox(lambda outputs: pytest.fail("out of order"))
        one.put(GAIN)
        one.wake()
        assert await one.take() == [GAIN]

    asyncio.run(run())


def test_after_a_choice_has_ended_the_sink_serves_the_others() -> None:
    async def run() -> None:
        one = inbox(lambda outputs: True, n=2)
        assert await (await come(one, END)) == [END]
        task = await come(one, GAIN)
        assert not task.done()
        task.cancel()

    asyncio.run(run())


def test_an_error_of_the_sink_is_raised_where_the_task_waits() -> None:
    async def run() -> None:
        def sink(outputs: list[Delta | Refusal]) -> bool:
            raise ZeroDivisionError

        task = await come(inbox(sink), GAIN)
        with pytest.raises(ZeroDivisionError):
            await task

    asyncio.run(run())


def test_an_engine_that_has_ended_reaches_the_task_past_the_sink() -> None:
    async def run() -> None:
        one = inbox(lambda outputs: True)
        one.error = EngineDead("gone")
        task = await come(one, GAIN)
        with pytest.raises(EngineDead):
            assert await task == [GAIN]
            await one.take()

    asyncio.run(run())


@pytest.mark.parametrize(
    ("n", "outputs", "last"),
    [
        (1, [GAIN, END], [False, True]),
        (2, [END, GAIN, END], [False, False, True]),
        (2, [REFUSED], [True]),
    ],
)
def test_put_tells_the_last_output_of_a_request(n: int, outputs: list[Delta | Refusal], last: list[bool]) -> None:
    one = inbox(None, n)
    assert [one.put(output) for output in outputs] == last
    assert not one.pending
