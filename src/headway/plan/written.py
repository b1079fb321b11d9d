"""`headway plan search --write DIR`: files that start the best deployment, a script per role and engine, and a compose
file where one node holds it all.

    DIR/vllm/serve.sh  or  prefill.sh decode.sh router.sh      run on the hosts that their first lines name
    DIR/vllm/compose.yaml                                      docker compose up, on a node with all its GPUs
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from headway.core.errors import BadInput
from headway.plan.answers_lists import Offer
from headway.plan.flags import PORTS
from headway.report.files import write

WIDTH = 96  # columns of a line of a command
ROLES = {1: ("serve",), 3: ("prefill", "decode", "router")}  # by how many commands there are
IMAGES = {
    "vllm": "${VLLM_IMAGE:-vllm/vllm-openai:latest}",
    "sglang": "${SGLANG_IMAGE:-lmsysorg/sglang:latest}",
    "trtllm": "${TRTLLM_IMAGE:-nvcr.io/nvidia/tensorrt-llm/release:latest}",
}
SHARED = "      - ${HF_HOME:-~/.cache/huggingface}:/root/.cache/huggingface"


def write_deployment(row: Offer, folder: Path) -> list[str]:
    """Write them; their paths.

    Raises:
        BadInput: it cannot be written.
    """
    texts = files(row)
    for name, text in texts.items():
        path = folder / name
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise BadInput("--write", f"cannot make {path.parent}: {error.strerror}") from None
        write(path, "--write", text)
        if path.suffix == ".sh":
            path.chmod(0o755)
    return [str(folder / name) for name in texts]


def files(row: Offer) -> dict[str, str]:
    """Texts by path: a folder for each engine of `row.flags`."""
    found: dict[str, str] = {}
    for engine, text in row.flags.items():
        beside, commands = parted(text)
        named = dict(zip(ROLES[len(commands)], commands, strict=True))
        found |= {f"{engine}/{name}": content for name, content in beside.items()}
        found |= {f"{engine}/{role}.sh": _script(role, command, row) for role, command in named.items()}
        if engine in IMAGES and row.hardware_kind == "gpu" and _one_node(row):
            found[f"{engine}/compose.yaml"] = compose(engine, row, named, list(beside))
    return found


def parted(text: str) -> tuple[dict[str, str], list[str]]:
    """(files, commands) of command lines that write some files first (`cat > NAME <<END`)."""
    beside: dict[str, str] = {}
    commands, name = [], ""
    for line in text.split("\n"):
        if line.startswith("cat > ") and line.endswith(" <<END"):
            name = line.removeprefix("cat > ").removesuffix(" <<END")
            beside[name] = ""
        elif name and line == "END":
            name = ""
        elif name:
            beside[name] += line + "\n"
        else:
            commands.append(line)
    return beside, commands


def broken(command: str, width: int = WIDTH) -> list[str]:
    """A command over several lines, broken before options."""
    if len(command) <= width or "<<END" in command:
        return [command]
    command, mark, comment = command.partition("  # ")
    lines = [""]
    for index, part in enumerate(command.split(" --")):
        option = part if index == 0 else f"--{part}"
        if lines[-1] and len(lines[-1]) + len(option) > width - 3:
            lines.append("   ")
        lines[-1] += f" {option}" if lines[-1] else option
    return [line + " \\" for line in lines[:-1]] + [lines[-1] + mark + comment]


def _script(role: str, command: str, row: Offer) -> str:
    hosts = {"prefill": row.prefill_replicas, "decode": row.replicas, "serve": row.replicas, "router": 1}[role]
    where = f"on each of {hosts} hosts, {role}-1 to {role}-{hosts}" if hosts > 1 else f"on the host {role}-1"
    way = row.prefill if role == "prefill" else None
    gpus, device, nodes = (way.gpus, way.hardware, way.nodes) if way else (row.gpus, row.hardware, row.nodes)
    needs = "" if role == "router" else f", {gpus} x {device}"
    lines = ["#!/usr/bin/env bash", f"# {row.name}", f"# Run this {where}{needs}."]
    if role != "router" and nodes > 1:
        lines += [f"# A replica is {nodes} nodes: start it on each.", ': "${NODE_RANK:?number of this node, from 0}"',
                  ': "${HEAD:?address of node 0}"']  # fmt: skip
    return "\n".join([*lines, "set -euo pipefail", 'cd "$(dirname "$0")"', *broken(command)]) + "\n"


def _one_node(row: Offer) -> bool:
    same = row.prefill is None or row.prefill.hardware == row.hardware
    return same and row.nodes == 1 and row.total_gpus <= 8 and (row.prefill is not None or row.replicas == 1)


def compose(engine: str, row: Offer, commands: Mapping[str, str], beside: Sequence[str]) -> str:
    """One service per worker, with GPUs of its own, and the router in front at port 8000."""
    lines, first = [f"# {row.name}", "# docker compose up; HF_TOKEN where the model asks for one", "services:"], 0
    for role, command in commands.items():
        count = {"prefill": row.prefill_replicas, "decode": row.replicas}.get(role, 1)
        gpus = 0 if role == "router" else row.prefill.gpus if role == "prefill" and row.prefill else row.gpus
        for number in range(1, count + 1):
            port = PORTS.get(role, 8000)
            lines += [
                f"  {role}-{number}:", f"    image: {IMAGES[engine]}", "    entrypoint: [bash, -c]",
                f"    command: [{json.dumps(_inside(command.partition('  # ')[0], role))}]", "    working_dir: /work",
                "    environment: [HF_TOKEN]", "    ipc: host", "    volumes:", SHARED,
                *(f"      - ./{name}:/work/{name}:ro" for name in beside),
                *([f'    ports: ["8000:{port}"]'] if role in ("router", "serve") else []),
            ]  # fmt: skip
            if role == "router":
                lines.append(f"    depends_on: [{', '.join(_workers(row))}]")
            if gpus:
                ids = ", ".join(f'"{device}"' for device in range(first, first + gpus))
                lines += ["    deploy:", "      resources:", "        reservations:", "          devices:",
                          f"            - {{driver: nvidia, device_ids: [{ids}], capabilities: [gpu]}}"]  # fmt: skip
                first += gpus
    return "\n".join(lines) + "\n"


def _inside(command: str, role: str) -> str:
    """A command as a container runs it, where compose would read a $ as its own."""
    if role == "serve" and "sglang" in command:
        command += " --host 0.0.0.0 --port 8000"
    if role == "serve" and "trtllm-serve" in command:
        command += " --host 0.0.0.0 --port 8000"
    return command.replace("$", "$$")


def _workers(row: Offer) -> list[str]:
    return [f"prefill-{n + 1}" for n in range(row.prefill_replicas)] + [f"decode-{n + 1}" for n in range(row.replicas)]
