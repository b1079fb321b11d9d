"""Noise is a pure function of its key."""

from __future__ import annotations

import numpy as np
import pytest

from headway.sampling.noise import DRAW, dense_uniforms, philox, uniforms

# Known answers of philox4x32-10 from the Random123 distribution (kat_vectors): counter, key, result.
KNOWN = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN)
def test_philox_gives_the_published_answers(counter: tuple, key: tuple, expected: tuple) -> None:
    first, *others = counter
    words = philox((np.array([first], np.uint64), *others), key[0] | key[1] << 32)
    assert tuple(words[0].tolist()) == expected


def test_sparse_and_dense_noise_agree() -> None:
    key = {"seed": -7, "choice": 3, "position": 123_456, "purpose": 1}
    dense = dense_uniforms(1001, **key)
    ids = np.array([1000, 0, 3, 4, 999, 500])
    assert np.array_equal(uniforms(ids, **key), dense[ids])


@pytest.mark.parametrize("seed", [0, 1, -1, 2**63 - 1, -(2**63) + 1])
def test_noise_is_inside_the_open_interval_for_every_seed(seed: int) -> None:
    noise = dense_uniforms(4096, seed=seed, choice=0, position=0)
    assert noise.min() > 0.0
    assert noise.max() < 1.0


def test_every_part_of_the_key_matters() -> None:
    base = {"seed": 1, "choice": 0, "position": 5, "purpose": DRAW}
    variants = [
        base,
        *({**base, name: base[name] + 1} for name in base),
        {**base, "seed": 1 + 2**32},
        {**base, "seed": -1},
    ]
    streams = np.stack([dense_uniforms(4000, **variant) for variant in variants])
    correlation = np.corrcoef(streams) - np.eye(len(variants))
    assert np.abs(correlation).max() < 0.08  # 5 sigma of 4000 independent pairs


def test_noise_is_uniform() -> None:
    noise = np.concatenate([dense_uniforms(1000, seed=11, choice=0, position=position) for position in range(100)])
    counts = np.bincount((noise * 64).astype(int), minlength=64)
    statistic = float(((counts - len(noise) / 64) ** 2 / (len(noise) / 64)).sum())
    assert statistic < 63 + 5 * np.sqrt(2 * 63)
