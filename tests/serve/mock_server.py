"""The real server around the scripted engine: `python mock_server.py OPTIONS_JSON`, which prints its port.

Unit tests of the server's whole life run this as a process of its own, as users do.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import msgspec

sys.path.insert(0, str(Path(__file__).parents[2]))

from headway.core.bound import QueueBound
from headway.core.errors import HeadwayError
from headway.serve.hosted import Served
from headway.serve.lifecycle import run
from headway.serve.options import ServeOptions
from tests.serve.scripted import ByteTokenizer

ENGINE = (sys.executable, str(Path(__file__).with_name("mock_engine.py")))


def say(line: str) -> None:
    print(line, flush=True)


def main(options: dict) -> int:
    if options.pop("plain_loop", False):
        sys.modules["uvloop"] = None  # type: ignore[assignment]  # as where it is not installed
    engines = options.pop("engines", {"scripted": options.pop("engine", {})})
    also = options.pop("also", ())
    queue = msgspec.convert(options.pop("queue", {"requests": 1024, "tokens": 4_000_000}), QueueBound)
    served = [
        Served(
            model=name,
            also=also,
            engine_command=ENGINE,
            engine_options=json.dumps(engine).encode(),
            queue=queue,
            load_text=ByteTokenizer,
        )
        for name, engine in engines.items()
    ]
    try:
        return run(msgspec.convert({"port": 0, **options}, ServeOptions), served, say=say)
    except HeadwayError as error:
        print(error, file=sys.stderr)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main(json.loads(sys.argv[1]) if len(sys.argv) > 1 else {}))
