"""What `plan search --write` leaves: scripts that a shell can read, and compose files that start both pools."""

from __future__ import annotations

import subprocess
from pathlib import Path

import msgspec
import pytest
import yaml

from headway.core.errors import BadInput
from headway.plan.answers_lists import Offer
from headway.plan.search import Wanted, search
from headway.plan.traffic import Target, Traffic
from headway.plan.written import broken, files, write_deployment
from headway.roofline.hardware import find_hardware
from headway.shape.catalogue import find_model

H100 = find_hardware("h100")


def offers(model: str = "llama-3.1-8b", engine: str = "vllm", rate: float = 5.0, ttft: float = 1.0) -> list[Offer]:
    wanted = Wanted((H100,), engine=engine, most=99)
    return search(model, find_model(model), Traffic(rate, 2000, 400), Target(ttft, 0.06), wanted).deployments


def split(engine: str) -> Offer:
    return next(row for row in offers(engine=engine) if row.prefill and row.total_gpus <= 8)


@pytest.mark.parametrize(("planned", "engine"), [("vllm", "vllm"), ("vllm", "sglang"), ("trtllm", "trtllm")])
def test_a_split_deployment_is_composed_of_both_pools_a_connector_and_a_router(planned: str, engine: str) -> None:
    row = split(planned)
    written = files(row)
    services = yaml.safe_load(written[f"{engine}/compose.yaml"])["services"]
    assert set(services) == {f"prefill-{n + 1}" for n in range(row.prefill_replicas)} | {
        f"decode-{n + 1}" for n in range(row.replicas)
    } | {"router-1"}  # fmt: skip
    held = [
        device["device_ids"] for service in services.values() if "deploy" in service
        for device in service["deploy"]["resources"]["reservations"]["devices"]
    ]  # fmt: skip
    ids = [each for some in held for each in some]
    assert sorted(ids) == sorted(map(str, range(row.total_gpus)))  # every GPU once
    commands = {name: service["command"][0] for name, service in services.items()}
    connector = {"vllm": "NixlConnector", "sglang": "--disaggregation-transfer-backend nixl"}.get(engine)
    if connector:
        assert all((connector in text) == (not name.startswith("router")) for name, text in commands.items())
    else:
        assert "cache_transceiver_config" in written["trtllm/settings.yaml"]
    assert services["router-1"]["ports"] == ["8000:8000"] and "prefill-1" in services["router-1"]["depends_on"]
    router = commands["router-1"] + written.get(f"{engine}/pools.yaml", "")
    assert all(name in router for name in services if name != "router-1")


@pytest.mark.parametrize(("model", "engine"), [
    ("llama-3.1-8b", "vllm"), ("llama-3.1-8b", "trtllm"), ("deepseek-r1", "vllm"), ("deepseek-r1", "trtllm"),
])  # fmt: skip
def test_every_script_is_one_that_a_shell_reads(model: str, engine: str, tmp_path: Path) -> None:
    for number, row in enumerate(offers(model, engine, ttft=5.0)):
        paths = write_deployment(row, tmp_path / str(number))
        scripts = [path for path in paths if path.endswith(".sh")]
        roles = {Path(path).stem for path in scripts}
        assert roles == ({"prefill", "decode", "router"} if row.prefill else {"serve"})
        for path in scripts:
            subprocess.run(["bash", "-n", path], check=True)
            assert Path(path).stat().st_mode & 0o100
        if row.nodes > 1:
            assert "NODE_RANK:?" in next(Path(path).read_text() for path in scripts if "router" not in path)


def test_long_commands_are_broken_before_options_and_stay_the_same_command() -> None:
    for row in offers(rate=20.0):
        for text in row.flags.values():
            for command in text.split("\n"):
                lines = broken(command)
                assert " ".join(line.rstrip("\\").strip() for line in lines) == command
                assert all(len(line) <= 100 or " --" not in line.strip() for line in lines)


def test_what_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "vllm").write_text("")
    with pytest.raises(BadInput, match="--write: cannot make"):
        write_deployment(offers()[0], tmp_path)
    cpu = msgspec.structs.replace(offers()[0], hardware_kind="cpu")
    assert not any("compose" in name for name in files(cpu))
