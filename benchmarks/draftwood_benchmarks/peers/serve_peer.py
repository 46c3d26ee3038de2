"""The program of a peer: `python serve_peer.py MODULE`, where the module beside it has the class `Engine`.

The protocol is described in `process.py` beside this file. Runs in the environment of a peer and imports nothing of
Draftwood.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import sys
from typing import Any


def main(module: str) -> None:
    answers = sys.stdout
    sys.stdout = sys.stderr  # libraries print there
    engine: Any = None
    for line in sys.stdin:
        request = json.loads(line)
        operation = request.pop("op")
        try:
            if operation == "load":
                engine = importlib.import_module(module).Engine(request)
                answer: dict[str, Any] = {"version": engine.version}
            else:
                assert engine is not None
                answer = getattr(engine, operation)(**request)
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        main(sys.argv[1])
