"""What a fleet is, as its TOML file says.

model = "llama-3.1-8b"
router = "prefix"
mtbf_hours = 24.0            # of each replica; left out = none fails by itself

[[replicas]]
hardware = "h100-sxm"
count = 4                    # there at the start
max_rows = 128               # and what else `headway simulate` knows of an engine

[autoscale]                  # of the first kind, or of the one whose number is `scaled`
least = 2
most = 12

[[events]]
at = 600.0
what = "fail"                # or "drain"
replica = 3                  # counted from 0, in the order in which they started
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import msgspec

from headway.core.clock import MAX_SECONDS
from headway.core.errors import BadInput
from headway.core.options import Option, Options, declared
from headway.core.toml_file import read_toml
from headway.roofline.step import MOST_DEVICES
from headway.routing.autoscale import MOST_REPLICAS, Autoscale
from headway.routing.policies import ROUTING
from headway.simulate.deploy import EngineSetup

FIELD = "--fleet"
MOST_REPLICAS_AT_START = 4096  # more take minutes before anything happens
LONGEST_WAIT = 86400.0  # seconds: of a repair or a start
MOST_HOURS = 1e6


class KindOptions(Options, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Replicas that are alike."""

    hardware: Annotated[str, Option("A name of `plan hardware`, or this-machine.")] = ""
    count: Annotated[int, Option("There at the start.", least=0, most=MOST_REPLICAS_AT_START)] = 1
    tp: Annotated[int, Option("Devices of one replica (tensor parallel).", least=1, most=MOST_DEVICES)] = 1
    precision: Annotated[str | None, Option("Weights: bf16, fp8, int4...; default: as stored.")] = None
    kv: Annotated[str | None, Option("Cache: bf16, fp8, int8.")] = None
    price: Annotated[float | None, Option("Dollars per device and hour; default: catalogued.", above=0)] = None
    slow: Annotated[float, Option("Steps take so many times as long; the router finds out.", above=0, most=1e3)] = 1.0
    start_seconds: Annotated[float, Option("From asking for one until it serves.", least=0, most=LONGEST_WAIT)] = 60.0

    @classmethod
    def about(cls) -> str:
        return "a kind of replica, or of its engine"


class Alike(msgspec.Struct, frozen=True):
    """What replicas are alike in: theirs, and their engines'."""

    options: KindOptions
    setup: EngineSetup


class Befalls(Options, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Something that happens to a replica."""

    at: Annotated[float, Option("Seconds after the start.", least=0, most=MAX_SECONDS)] = 0.0
    what: Annotated[str, Option("What happens.", ("fail", "drain"))] = "fail"
    replica: Annotated[int, Option("Its number, from 0.", least=0, most=MOST_REPLICAS)] = 0

    @classmethod
    def about(cls) -> str:
        return "an event"


class FleetOptions(Options, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What all replicas share."""

    model: Annotated[str, Option("A name of `plan models`, a hub id, a folder, or a .gguf file.")] = ""
    router: Annotated[str, Option("The routing policy.", tuple(ROUTING))] = "prefix"
    most_in_flight: Annotated[
        int | None, Option("Most requests that a replica has at once; others wait at the router.", least=1)
    ] = None
    mtbf_hours: Annotated[
        float | None, Option("Mean hours between failures of a replica.", least=1e-4, most=MOST_HOURS)
    ] = None
    repair_seconds: Annotated[float, Option("From a failure until it is back.", least=0.001, most=LONGEST_WAIT)] = 60.0
    scaled: Annotated[int, Option("Which kind the autoscaler starts and ends, from 0.", least=0)] = 0

    @classmethod
    def about(cls) -> str:
        return "a fleet"


class FleetFile(msgspec.Struct, frozen=True):
    """A fleet. autoscale: None = the replicas there are stay."""

    options: FleetOptions
    kinds: tuple[Alike, ...]
    events: tuple[Befalls, ...] = ()
    autoscale: Autoscale | None = None


def read_fleet(path: Path, setup: EngineSetup) -> FleetFile:
    """A fleet file. setup: what its engines are set up like where it does not say.

    Raises:
        BadInput: it cannot be read, or says what is not accepted.
    """
    table = read_toml(path, FIELD)
    try:
        return _fleet(table, setup)
    except BadInput as error:
        raise BadInput(FIELD, f"{path}: {_as_written(str(error))}") from None


def _as_written(problem: str) -> str:
    """A sentence about an option, with its name as a file has it."""
    flag, colon, rest = problem.partition(":")
    return flag.removeprefix("--").replace("-", "_") + colon + rest if flag.startswith("--") else problem


def _fleet(table: dict[str, Any], setup: EngineSetup) -> FleetFile:
    rows = {name: table.pop(name, []) for name in ("replicas", "events")}
    for name, one in rows.items():
        if not isinstance(one, list) or not all(isinstance(row, dict) for row in one):
            raise BadInput(name, f"accepted: tables, each headed [[{name}]]")
    scale = table.pop("autoscale", None)
    if scale is not None and not isinstance(scale, dict):
        raise BadInput("autoscale", "accepted: a table, headed [autoscale]")
    options, kinds = FleetOptions.of(table), tuple(_kind(row, setup) for row in rows["replicas"])
    if not kinds:
        raise BadInput("[[replicas]]", "is needed, with hardware in it")
    if options.scaled >= len(kinds):
        raise BadInput("scaled", f"{options.scaled}; there are {len(kinds)} [[replicas]], numbered from 0")
    events, goal = tuple(map(Befalls.of, rows["events"])), None if scale is None else Autoscale.of(scale)
    fleet = FleetFile(options, kinds, events, goal)
    if not sum(kind.options.count for kind in kinds) and goal is None:
        raise BadInput("count", "is 0 for all replicas, and no [autoscale] starts any")
    if len({kind.setup.max_model_len for kind in kinds}) > 1:
        raise BadInput("max_model_len", "must be the same for all replicas: the router does not choose by it")
    if len({kind.setup.block_size for kind in kinds}) > 1:
        raise BadInput("block_size", "must be the same for all replicas: the router counts blocks of one size")
    return fleet


def _kind(row: dict[str, Any], setup: EngineSetup) -> Alike:
    engine = {name: row.pop(name) for name in list(row) if name in declared(EngineSetup)}
    options = KindOptions.of(row)
    if not options.hardware:
        raise BadInput("hardware", "is needed in [[replicas]], such as h100-sxm")
    return Alike(options, EngineSetup.of(msgspec.structs.asdict(setup) | engine))
