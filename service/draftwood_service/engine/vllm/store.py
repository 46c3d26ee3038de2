"""The store that the memories of vLLM's worker and those of its host have in common."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager

from draftwood_memory.store.embedded import EmbeddedServer, default_folder, socket_url
from draftwood_service.engine.link import service_has_ended
from draftwood_service.engine.process import temporary_store
from draftwood_service.settings import Settings


@contextmanager
def with_store(settings: Settings, name: str) -> Iterator[Settings]:
    """The settings with the address of a store that both processes reach.

    An embedded store is run by this process. With none (`store` is "memory") there is one as well, on a temporary
    folder: drafts and operations on memories work as if they were in one process; what was learned outlives an engine
    that dies, and is gone with the service.

    Args:
        name: of the service.
    """
    if settings.store not in ("memory", "embedded"):
        yield settings
        return
    temporary = settings.store == "memory"
    folder = temporary_store(name) if temporary else settings.store_folder or default_folder()
    try:
        with EmbeddedServer(folder, settings.store_bytes) as server:
            server.wait()
            yield settings.model_copy(update={"store": socket_url(folder)})
    except BaseException as error:
        if temporary and (isinstance(error, EOFError) or service_has_ended(error)):
            shutil.rmtree(folder, ignore_errors=True)
        raise
