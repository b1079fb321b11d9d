"""The real server around the scripted engine: `python mock_server.py OPTIONS_JSON`, which prints its port.

Unit tests of the server's whole life run this as a process of its own, as users do.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from headway.core.bound import QueueBound
from headway.core.errors import HeadwayError
from headway.serve.lifecycle import ServeOptions, run
from tests.serve.scripted import ByteTokenizer

ENGINE = (sys.executable, str(Path(__file__).with_name("mock_engine.py")))


def say(line: str) -> None:
    print(line, flush=True)


def main(options: dict) -> int:
    if options.pop("plain_loop", False):
        sys.modules["uvloop"] = None  # type: ignore[assignment]  # as where it is not installed
    engine = json.dumps(options.pop("engine", {})).encode()
    if "api_key_file" in options:
        options["api_key_file"] = Path(options["api_key_file"])
    if "queue" in options:
        options["queue"] = QueueBound(**options["queue"])
    try:
        return run(
            ServeOptions(
                model="scripted",
                **{"port": 0, **options},
                engine_command=ENGINE,
                engine_options=engine,
                load_text=ByteTokenizer,
                say=say,
            )
        )
    except HeadwayError as error:
        print(error, file=sys.stderr)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main(json.loads(sys.argv[1]) if len(sys.argv) > 1 else {}))
