"""What runs on the nodes that do not serve: vLLM's workers of one node, until the leader ends.

Imports little before it runs, as `engine.main`.
"""

from __future__ import annotations

import os
import pickle
import signal
import socket
import sys
import threading
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from draftwood_service.settings import Settings

_QUIET_SECONDS, _ASK_SECONDS, _ASKED = 10, 5, 3
"""Keepalive of the connection to the leader, whose machine may end without a word."""


def main() -> None:
    """Ends with status 0 after SIGTERM, else 1, so that its supervisor starts it again.

    A node that has joined ends with its leader, which finishes its requests after SIGTERM, and needs all nodes for it.
    """
    settings: Settings = pickle.load(sys.stdin.buffer)
    import structlog

    from draftwood_model_runner.errors import DraftwoodError
    from draftwood_service.engine.vllm.core import engine_config, tested_version, workers_of_node
    from draftwood_service.engine.vllm.loading import arguments_of, set_variables
    from draftwood_service.logging_config import configure_logging
    from draftwood_vllm.service_link import ELSEWHERE, SOCKET_VARIABLE

    configure_logging(settings.log_level, settings.log_format)
    log = structlog.get_logger("draftwood")
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(0))
    set_variables(settings)
    os.environ[SOCKET_VARIABLE] = ELSEWHERE
    try:
        tested_version()
        config = engine_config(arguments_of(settings))
    except DraftwoodError as error:
        sys.exit(f"draftwood serve: {error}")
    leader = (config.parallel_config.master_addr, config.parallel_config.master_port)
    log.info("joining", node_rank=settings.node_rank, leader=leader[0])
    executor = workers_of_node(config)
    told = threading.Event()
    signal.signal(signal.SIGTERM, lambda number, frame: told.set())
    threading.Thread(target=_end_with, args=(leader, executor), name="draftwood-leader", daemon=True).start()
    log.info("computing for the leader", node_rank=settings.node_rank, leader=leader[0])
    executor.start_worker_monitor(inline=True)
    log.info("vLLM's workers have ended", failed=executor.is_failed)
    os._exit(0 if told.is_set() else 1)


def _end_with(leader: tuple[str, int], executor: Any) -> None:
    """Ends vLLM's workers when the leader's end of a connection is closed: vLLM's own queues do not notice."""
    try:
        with socket.create_connection(leader) as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _QUIET_SECONDS)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _ASK_SECONDS)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _ASKED)
            while connection.recv(64):
                pass
    except OSError:
        pass
    executor.shutdown()


if __name__ == "__main__":
    main()
