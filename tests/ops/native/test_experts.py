"""Mixtures of experts on every instruction set: numpy's choice of experts, each the bits of a gated MLP of its own,
and no row changed by its neighbours."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from headway.ops.native.backend import NativeBackend
from headway.ops.reference import ReferenceBackend, ReferenceOps
from headway.ops.routing import ClampedSwiGLU, Routing, choose
from headway.ops.weight import Stack, Weight, stack
from tests.ops.native.harness import ONE_LAYER, blocks, kernels, matrix, random, run, step, vector

ROUTINGS = {
    "softmax": Routing(2),
    "renormalised": Routing(3, renormalise=True, scale=0.7),
    "all": Routing(6, renormalise=True),
    "best groups": Routing(3, scale=16.0, groups=3, kept_groups=2),
    "sigmoid": Routing(3, sigmoid=True, renormalise=True, scale=2.5, groups=2, kept_groups=1, merit=2),
}
EXPERTS, WIDTH, HIDDEN = 6, 64, 40


def matrices(out: int, inputs: int, format: str = "f32", seed: int = 0, count: int = EXPERTS) -> Stack:
    if format in ("f32", "f16", "bf16"):
        return stack("w", tuple(matrix(random(out, inputs, seed=seed + i) * 0.3, format) for i in range(count)))
    return stack("w", tuple(blocks(out, inputs, format, seed + i, (-9, -6)) for i in range(count)))


def layer(format: str = "f32", hidden: int = HIDDEN, width: int = WIDTH) -> list[Weight]:
    router = Weight(**{**vars(matrix(random(EXPERTS, width, seed=9) * 0.2)), "part": "router"})
    return [
        router,
        matrices(hidden, width, format, 10),
        matrices(hidden, width, format, 30),
        matrices(width, hidden, format, 50),
    ]


def reference(x: np.ndarray, family: Any) -> np.ndarray:
    return family(ReferenceOps({}, step(len(x))), x)


@pytest.mark.parametrize("kernel", kernels())
@pytest.mark.parametrize("name", ROUTINGS)
@pytest.mark.parametrize("rows", [1, 3, 70])
def test_choice_weights_and_biases_equal_the_reference(kernel: str, name: str, rows: int) -> None:
    routing, x = ROUTINGS[name], random(rows, WIDTH, seed=rows)
    activation = ClampedSwiGLU(1.3, 0.9) if name == "renormalised" else "silu"
    biases = [
        vector(random(n, seed=n)) for n in (EXPERTS, EXPERTS, EXPERTS * HIDDEN, EXPERTS * HIDDEN, EXPERTS * WIDTH)
    ]
    results = []
    for backend in (NativeBackend(threads=2, kernels=kernel), ReferenceBackend()):
        weights = [backend.prepare(w) for w in layer()]
        extra = [backend.prepare(b) for b in biases] if name in ("renormalised", "sigmoid") else [None] * 5

        def family(ops: Any, h: Any, weights: Any = weights, extra: Any = extra) -> Any:
            return ops.experts(h, *weights, routing, activation, *extra, h)

        results.append(run(backend, x, family) if isinstance(backend, NativeBackend) else reference(x, family))
    np.testing.assert_allclose(*results, rtol=2e-5, atol=5e-6 * np.abs(results[1]).max())


@pytest.mark.parametrize("kernel", kernels())
@pytest.mark.parametrize("format", ["q8_0", "q4_0", "q4_1", "q3_k", "q6_k", "bf16", "f16", "int4", "int8"])
def test_an_expert_is_a_gated_mlp(kernel: str, format: str) -> None:
    size = 256 if format.endswith("_k") else 96
    target = format if format in ("int4", "int8") else "stored"
    backend = NativeBackend(threads=2, kernels=kernel, weights=target)
    plain = layer("f32" if target != "stored" else format, size, size)
    router, *stacks = plain
    x, routing = random(40, size), Routing(2, renormalise=True)
    prepared = [backend.prepare(w) for w in plain]
    got = run(backend, x, lambda ops, h: ops.experts(h, *prepared, routing, "silu"))
    chosen, weights = choose(x @ router.dequantise().T, routing)
    expected = np.zeros_like(got)
    for expert in range(EXPERTS):
        own = [backend.prepare(s.matrices[expert]) for s in stacks if isinstance(s, Stack)]
        out = run(backend, x, lambda ops, h, own=own: ops.gated_mlp(h, *own, "silu"))
        rows, ranks = np.nonzero(chosen == expert)
        expected[rows] += weights[rows, ranks, None] * out[rows]
    np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-5 * np.abs(expected).max())


@pytest.mark.parametrize("kernel", kernels())
@pytest.mark.parametrize("format", ["f32", "bf16", "q4_0", "q8_0"])
def test_a_row_does_not_depend_on_its_neighbours(kernel: str, format: str) -> None:
    backend = NativeBackend(threads=2, kernels=kernel)
    weights, x = [backend.prepare(w) for w in layer(format, 96)], random(330, WIDTH)

    def family(ops: Any, h: Any) -> Any:
        return ops.experts(h, *weights, Routing(2), "silu", residual=h)

    whole = run(backend, x, family)
    for rows in ([7], [7, 300], [7, 8, 9, 300, 5], list(range(0, 330, 3))):
        np.testing.assert_array_equal(run(backend, x, family, rows), whole[rows])


@pytest.mark.parametrize("kernel", kernels()[:1])
def test_it_tells_how_many_experts_had_rows(kernel: str) -> None:
    backend = NativeBackend(threads=2, kernels=kernel)
    weights, x = [backend.prepare(w) for w in layer()], random(3, WIDTH)
    table = backend.prepare(matrix(x))
    backend.allocate(ONE_LAYER)

    def forward(ops: Any) -> Any:
        h = ops.experts(ops.embed(table), *weights, Routing(2), "silu")
        return ops.logit_rows(ops.experts(h, *weights, Routing(1), "silu"))

    program = backend.compile(forward)
    program.run(step(3))
    numbers = x @ layer()[0].dequantise().T
    assert program.experts[0] == len(np.unique(choose(numbers, Routing(2))[0]))
    assert 1 <= program.experts[1] <= 3


@pytest.mark.parametrize("kernel", kernels())
def test_a_number_per_row_gates_it(kernel: str) -> None:
    backend, x = NativeBackend(threads=1, kernels=kernel), random(5, WIDTH)
    weight = backend.prepare(matrix(random(1, WIDTH, seed=4)))
    got = run(backend, x, lambda ops, h: ops.sigmoid_gate(h, ops.linear(h, weight), h))
    np.testing.assert_allclose(got, x + x / (1 + np.exp(-(x @ weight.unpack().T))), rtol=1e-5, atol=1e-6)
