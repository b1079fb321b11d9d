"""One memory plan: whoever asks about a machine starts from the same bytes and takes the same weights off them."""

from __future__ import annotations

from pathlib import Path

import pytest

from headway.engine import build, profile, references
from headway.engine.options import EngineOptions
from headway.engine.references import load_device
from headway.measure.probe import save_profile
from headway.plan import estimates, search, steps
from headway.plan.search import Wanted
from headway.plan.setup import Setup
from headway.plan.traffic import Target, Traffic
from headway.roofline.hardware import find_hardware
from headway.roofline.memory import MemoryPlan, replica_memory
from headway.roofline.profile import Profile
from headway.roofline.work import Layout
from headway.shape.catalogue import find_model

LLAMA, H100 = "llama-3.1-8b", find_hardware("h100-sxm")


def plans(gpus: int) -> dict[str, MemoryPlan]:
    """By verb, of one GPU of the same replica."""
    setup = Setup(LLAMA, "h100-sxm", gpus)
    exact = Setup(LLAMA, "h100-sxm", gpus, mode="exact")
    wanted = Wanted((H100,), degrees=(gpus,))
    found = search.search(LLAMA, find_model(LLAMA), Traffic(2.0, 2000, 300), Target(None, 0.05), wanted)
    return {
        "capacity": steps.capacity(setup, 4096).memory,
        "exact capacity": steps.capacity(exact, 4096).memory,
        "step": steps.step(setup, 8, 4096).memory,
        "tp": steps.tensor_parallel(setup, [gpus], 8, 4096).memory,
        "estimate": estimates.estimate(setup, 8, 2000, 300).memory,
        "search": found.deployments[0].memory,
        "simulator": replica_memory(find_model(LLAMA), H100, Layout(gpus)),
    }


@pytest.mark.parametrize("gpus", [1, 4])
def test_every_verb_divides_the_same_memory_of_an_h100(gpus: int) -> None:
    found = plans(gpus)
    assert {plan.usable for plan in found.values()} == {80e9}
    weights = find_model(LLAMA).stored.total / gpus
    assert [plan.weights for plan in found.values()] == pytest.approx([weights] * len(found))
    kept = {verb: plan.activations + plan.reserve for verb, plan in found.items()}
    assert kept["capacity"] == kept["tp"] == 0  # a bound's reserve is the user's to name
    assert kept["estimate"] == kept["search"] == kept["simulator"] > 1e9


def test_this_machine_is_planned_with_what_the_engine_would_start_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "profile.json"
    save_profile(Profile("box", "2026-01-01", 2, 64e9, {"2": 18e9}, {"fp32": 1e11, "int8": 1e11}), path)
    monkeypatch.setattr(profile, "profile_path", lambda: path)
    for module in (build, references):
        monkeypatch.setattr(module, "free_memory", lambda: 3 << 30)
    engine = build.build_engine(EngineOptions(max_rows=2, max_model_len=64))
    try:
        assert engine.memory.usable == load_device("this-machine").usable == 3 << 30
        assert dict(engine.lines())["usable memory"] == "3.00 GiB"
    finally:
        engine.close()
