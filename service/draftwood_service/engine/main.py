"""What runs in the engine's process: loads the engine, and hosts it until the service has ended.

Imports little before it runs: vLLM imports this module in each of its processes, and its CPU build looks into all that
is imported there, which cffi's modules break.
"""

from __future__ import annotations

import gc
import pickle
import signal
import socket
import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from draftwood_service.engine.loaded import LoadedEngine
    from draftwood_service.settings import Settings

_LOADING = {"draftwood": "draftwood_service.engine.loading", "vllm": "draftwood_service.engine.vllm.loading"}
"""By engine, the module whose `loaded` loads it."""


def main() -> None:
    """Runs the engine until the service's end of the link is closed. Signals are for the service to handle."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    settings: Settings = pickle.load(sys.stdin.buffer)
    from draftwood_service.engine.host import EngineHost
    from draftwood_service.engine.link import EngineEnd
    from draftwood_service.logging_config import configure_logging

    configure_logging(settings.log_level, settings.log_format)
    gc.disable()  # until the engine is loaded: what is imported stays, and collections take a tenth of the time
    end = EngineEnd(socket.socket(fileno=int(sys.argv[1])))

    def load() -> AbstractContextManager[LoadedEngine]:
        loading: Any = import_module(_LOADING[settings.engine])
        found: AbstractContextManager[LoadedEngine] = loading.loaded(settings, end.interrupt, sys.argv[2])
        return found

    EngineHost(end, load, settings.stream_interval).run()


if __name__ == "__main__":
    main()
