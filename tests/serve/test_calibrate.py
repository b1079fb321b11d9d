"""`headway calibrate --url` against a server of the built-in model, and what the profile that it writes then says."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from headway.bench.exercise import CELLS
from headway.core.events import StepDone
from headway.engine.event_file import read_events
from headway.ops import native
from headway.roofline.noise import CHUNK, DECODE
from headway.roofline.profile import load_profile
from tests.serve.conftest import Server

pytestmark = pytest.mark.skipif(bool(native.why_not()), reason="no kernels")


def headway(*arguments: str) -> Any:
    command = [sys.executable, "-m", "headway", *arguments, "--json"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def calibrated(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path, Path]:
    """What it printed, the profile, and the log it is fitted to. Saved whatever it is worth: machines of tests are
    busy."""
    folder = tmp_path_factory.mktemp("calibrate")
    log, profile = folder / "run.jsonl", folder / "profile.json"
    command = [sys.executable, "-m", "headway", "serve", "demo", "--port", "0", "--event-log", str(log)]
    try:
        server = Server(command=[*command, "--kv-cache-gib", "0.2", "--max-model-len", "2048"])
    except AssertionError as error:
        pytest.skip(f"not to be had here: {error}")
    try:
        found = headway("calibrate", str(log), "--model", "demo", "--url", server.url, "--seconds", str(3 * len(CELLS)),
                        "--output", str(profile), "--force")  # fmt: skip
    finally:
        server.kill()
    return found, profile, log


def test_it_fits_the_steps_that_the_server_took_and_says_what_the_fit_is_worth(calibrated: Any) -> None:
    found, path, log = calibrated
    held = {one["kind"]: one for one in found["held_out"]}
    assert held.keys() >= {"mixed"} and all(0 <= one["median"] <= one["p90"] for one in held.values())
    steps = [one for one in read_events(log) if isinstance(one, StepDone)]
    (body, *_), *_ = load_profile(path).fits["native"].values()
    assert len(CELLS) < sum(one["steps"] for one in found["fits"]) <= len(steps)
    assert body.noise.keys() == {DECODE, CHUNK} and body.bandwidth[0] > 0


def test_its_profile_simulates_a_load_with_the_servers_own_noise(calibrated: Any) -> None:
    _, path, log = calibrated
    load = ["--model", "demo", "--hardware", str(path), "--requests", "30", "--concurrency", "4"]
    one, again, other = (
        headway("simulate", *load, "--input-tokens", "60", "--output-tokens", "30", "--seed", seed) for seed in "001"
    )
    assert one == again and one["tpot_ms"]["mean"] != other["tpot_ms"]["mean"]
    decodes = [one for one in read_events(log) if isinstance(one, StepDone) and one.shape.rows == one.shape.tokens == 1]
    fastest = min(1e3 * step.seconds.executor for step in decodes)
    assert fastest / 2 < one["tpot_ms"]["p50"] < 200 * fastest, "of four in flight, beside prompts"
