"""The texts' table of speculation, by the code that verifies drafts."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from headway.core.errors import BadInput
from headway.simulate.speculation import overlapping, table

K, SHARES = (2, 4, 8), (0.6, 0.8, 0.9)
FIGURES = Path(__file__).parents[1] / "data" / "figures.json"


def test_made_up_distributions_overlap_as_asked() -> None:
    for share in (0.0, 0.5, 1.0):
        p, q = overlapping(share, np.random.default_rng(0))
        assert p.sum() == pytest.approx(1) == q.sum()
        assert np.minimum(p, q).sum() == pytest.approx(share)


def test_the_texts_table() -> None:
    published = {one["id"]: one["expect"] for one in json.loads(FIGURES.read_text())["figures"]}
    found = {
        (line["drafts"], line["overlap"]): line
        for line in table([*K], [*SHARES], 0.05, "rejection", 60_000, 0)["lines"]
    }
    for (k, share), line in found.items():
        assert line["tokens_per_step"] == pytest.approx(published[f"spec-{k}-{share}"], rel=0.01)
        assert line["acceptance"] == pytest.approx(share, abs=0.01)
    assert found[4, 0.8]["speedup"] == pytest.approx(published["spec-speedup"], rel=0.01)


def test_shared_noise_accepts_nearly_as_many() -> None:
    (line,) = table([4], [0.8], 0.05, "coupled", 20_000, 0)["lines"]
    assert 0.8 / 1.2 < line["acceptance"] <= 0.8  # a share c in common: from c / (2 - c) to c
    assert line["tokens_per_step"] == pytest.approx(line["formula"], rel=0.02)


@pytest.mark.parametrize(
    "fields", [{"drafts": [0]}, {"shares": [1.5]}, {"cost": -1.0}, {"mode": "accept-all"}, {"steps": 0}]
)
def test_what_is_out_of_range_is_refused(fields: dict) -> None:
    given = {"drafts": [1], "shares": [0.5], "cost": 0.05, "mode": "rejection", "steps": 10, "seed": 0, **fields}
    with pytest.raises(BadInput):
        table(**given)
