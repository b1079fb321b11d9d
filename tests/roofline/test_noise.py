"""How steps vary, drawn again: by the seed and the number of the step alone."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from headway.roofline.noise import BLOCK, CHUNK, DECODE, UNIT, StepNoise

MEASURED = {DECODE: tuple(range(800, 800 + 5 * BLOCK)), CHUNK: (990, 1010, 5000)}


@given(
    seed=st.integers(0, 1 << 70), begin=st.integers(0, 3 * BLOCK), count=st.integers(0, 3 * BLOCK),
    kind=st.sampled_from([DECODE, CHUNK]),
)  # fmt: skip
def test_many_steps_at_once_vary_as_one_by_one(seed: int, begin: int, count: int, kind: str) -> None:
    one, many = StepNoise(MEASURED, seed), StepNoise(MEASURED, seed)
    assert many.factors(begin, count, kind) == [one.factor(begin + index, kind) for index in range(count)]
    assert many.factor(begin, kind) == one.factor(begin, kind), "whatever was asked before"


def test_steps_that_follow_each_other_were_measured_so() -> None:
    factors = StepNoise(MEASURED, 3).factors(0, 4 * BLOCK, DECODE)
    for block in range(4):
        first = factors[block * BLOCK]
        assert factors[block * BLOCK : (block + 1) * BLOCK] == list(range(first, first + BLOCK))
    assert len({factors[block * BLOCK] for block in range(4)}) > 1


def test_both_kinds_take_theirs_from_the_same_part_of_what_was_measured() -> None:
    known = dict.fromkeys((DECODE, CHUNK), (500,) * (8 * BLOCK) + (2000,) * (8 * BLOCK))
    noise = StepNoise(known, 0)
    steps = range(0, 64 * BLOCK, BLOCK // 2)
    assert [noise.factor(step, DECODE) for step in steps] == [noise.factor(step, CHUNK) for step in steps]
    assert {noise.factor(step, CHUNK) for step in steps} == {500, 2000}


def test_every_step_that_was_measured_is_as_likely_but_for_the_ends() -> None:
    noise = StepNoise(MEASURED, 1)
    mean = sum(noise.factors(0, 4000 * BLOCK, DECODE)) / (4000 * BLOCK)
    assert abs(mean - sum(MEASURED[DECODE]) / len(MEASURED[DECODE])) < 8


def test_few_steps_are_taken_again_and_unknown_kinds_do_not_vary() -> None:
    assert set(StepNoise({CHUNK: (990, 1010, 5000)}, 0).factors(0, 2 * BLOCK, CHUNK)) == {990, 1010, 5000}
    assert set(StepNoise({CHUNK: (990,), DECODE: ()}, 0).factors(0, 2 * BLOCK, DECODE)) == {UNIT}


def test_seeds_differ() -> None:
    assert StepNoise(MEASURED, 0).factors(0, BLOCK, DECODE) != StepNoise(MEASURED, 1).factors(0, BLOCK, DECODE)
