"""Opens the memory of the model that an engine serves, by the variables of its environment."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from draftwood_memory.engines.drafts import EngineDrafts
from draftwood_memory.engines.fingerprint import UnknownCheckpointError, fingerprint_of
from draftwood_memory.engines.options import trusted_options
from draftwood_memory.settings.memory_settings import ENV_PREFIX, MemorySettings, read_environment
from draftwood_memory.settings.opening import opened_memory
from draftwood_vllm.service_link import SOCKET_VARIABLE, Recorder

_log = logging.getLogger("draftwood")

TENANT_VARIABLE = "DRAFTWOOD_TENANT"
"""The tenant of requests that name none, as of the calls of Draftwood's client."""
ONLY_TENANT = "default"
"""That of a process whose environment names neither a tenant nor a store."""
_STRATEGY = "trie"
"""Unless the environment says otherwise. vLLM shows no predictions beside the tokens that are written, so what a hybrid
adds to it has nothing to learn from: it accepted 0 to 2% less on each of seven traces (`draftwood bench replay --chains
16 --cut 0.1`)."""


class Opened:
    """Drafts of an engine, with the store that they use.

    Args:
        environ: variables `DRAFTWOOD_...`.
        folder: of the checkpoint; None if it is not known.
        name: of the model, in place of a fingerprint where there is none.
        vocabulary: the tokenizer's.
        vocab_size, longest, is_live: as in `EngineDrafts`.

    Raises:
        InvalidSettingError: a variable has a value that is not allowed.
        MemoryStoreError: the embedded store does not start.
    """

    def __init__(
        self,
        environ: Mapping[str, str],
        folder: Path | None,
        name: str,
        vocabulary: Mapping[str, int],
        vocab_size: int,
        longest: int,
        is_live: Callable[[str], bool],
    ) -> None:
        settings = read_environment(environ, strategy=_STRATEGY)
        tenant = tenant_of(environ, settings)
        of_service: dict[str, Any] = {}
        with ExitStack() as stack:
            memory = stack.enter_context(opened_memory(settings, fingerprint(folder, name, vocabulary)))
            if path := environ.get(SOCKET_VARIABLE):
                recorder = stack.enter_context(Recorder(path, memory))
                of_service = {"read": trusted_options, "tell": recorder.tell}
            self.drafts = EngineDrafts(memory, settings, tenant, vocab_size, longest, is_live, **of_service)
            self.drafts.start()
            self._store = stack.pop_all()
        _log.info("drafting with %s: %s", settings.strategy, _described(settings, tenant, bool(of_service)))

    def close(self) -> None:
        """Sends what was learned to the store, and stops. Blocks for seconds at most."""
        with self._store:
            self.drafts.close()


def tenant_of(environ: Mapping[str, str], settings: MemorySettings) -> str:
    """The tenant of requests that name none; "" for none."""
    return environ.get(TENANT_VARIABLE) or (ONLY_TENANT if settings.store == "memory" else "")


def _described(settings: MemorySettings, tenant: str, of_service: bool = False) -> str:
    """Where drafts come from, for the log. Without the store's address, which may hold a password."""
    if of_service:
        return "Draftwood's service decides for each request"
    unnamed = f'requests that name no tenant are of tenant "{tenant}"' if tenant else ""
    unnamed = unnamed or "requests that name no tenant draft from their own text and share nothing"
    if settings.store != "memory":
        return f"memories are kept in the store and shared with all that use it; {unnamed}"
    return (
        f"from what this process wrote, kept in its memory alone; {unnamed}; set {ENV_PREFIX}STORE to share and keep it"
    )


def fingerprint(folder: Path | None, name: str, vocabulary: Mapping[str, int]) -> str:
    """What the memories of a model are known by; for a model without a checkpoint that can be read, its name."""
    problem = "its folder is not known"
    if folder is not None:
        try:
            return fingerprint_of(folder, vocabulary)
        except UnknownCheckpointError as error:
            problem = str(error)
    _log.warning("the model is known by its name alone, so vLLM shares its memories with no other engine: %s", problem)
    return hashlib.sha256(f"{name}\n{sorted(vocabulary.items())}".encode("utf-8", "surrogatepass")).hexdigest()[:16]
