"""Opens the memory of the model that an engine serves, by the variables of its environment."""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from socket import gethostname

from draftwood_memory.engines.drafts import EngineDrafts
from draftwood_memory.engines.fingerprint import UnknownCheckpointError, fingerprint_of
from draftwood_memory.engines.policy import RequestPolicy, SettingsPolicy
from draftwood_memory.settings.memory_settings import ENV_PREFIX, MemorySettings, cache_folder, read_environment
from draftwood_memory.settings.opening import opened_memory, store_client, store_keys
from draftwood_tenants.engines.following import TenantThread
from draftwood_tenants.engines.policy import TenantPolicy
from draftwood_tenants.file import SETTING as TENANTS_FILE
from draftwood_tenants.followed import FollowedTenants
from draftwood_tenants.reading import ServerLimits

_log = logging.getLogger("draftwood")

TENANTS_FILE_VARIABLE = f"{ENV_PREFIX}{TENANTS_FILE.upper()}"
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
        InvalidInputError: the tenants file cannot be read, or is wrong.
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
        with ExitStack() as stack:
            memory = stack.enter_context(opened_memory(settings, _fingerprint(folder, name, vocabulary)))
            policy = _policy(environ, settings, stack)
            self.drafts = EngineDrafts(memory, settings, tenant, vocab_size, longest, is_live, policy)
            self.drafts.start()
            self._store = stack.pop_all()
        _log.info("drafting with %s: %s", settings.strategy, _described(settings, tenant))

    def close(self) -> None:
        """Sends what was learned to the store, and stops. Blocks for seconds at most."""
        with self._store:
            self.drafts.close()


def tenant_of(environ: Mapping[str, str], settings: MemorySettings) -> str:
    """The tenant of requests that name none; "" for none."""
    return environ.get(TENANT_VARIABLE) or (ONLY_TENANT if settings.store == "memory" else "")


def _policy(environ: Mapping[str, str], settings: MemorySettings, stack: ExitStack) -> RequestPolicy:
    """Tenants' configurations and experiments, followed until `stack` is closed; what the settings say without any."""
    file = environ.get(TENANTS_FILE_VARIABLE)
    client = store_client(settings)
    if client is None and not file:
        return SettingsPolicy(settings)
    limits = ServerLimits(settings.strategy, settings.max_draft_nodes, settings.memory_tokens, settings.memory_bytes)
    keys, cache = store_keys(settings), cache_folder(environ)
    followed = FollowedTenants(client, keys, Path(file) if file else None, cache, limits)
    thread = TenantThread(followed, f"{gethostname()}/{os.getpid()}")
    stack.callback(thread.close)
    thread.start(settings.store_timeout + 1.0)
    return TenantPolicy(followed.catalog, settings, thread.record)


def _described(settings: MemorySettings, tenant: str) -> str:
    """Where drafts come from, for the log. Without the store's address, which may hold a password."""
    unnamed = f'requests that name no tenant are of tenant "{tenant}"' if tenant else ""
    unnamed = unnamed or "requests that name no tenant draft from their own text and share nothing"
    if settings.store != "memory":
        return f"memories are kept in the store and shared with all that use it; {unnamed}"
    return (
        f"from what this process wrote, kept in its memory alone; {unnamed}; set {ENV_PREFIX}STORE to share and keep it"
    )


def _fingerprint(folder: Path | None, name: str, vocabulary: Mapping[str, int]) -> str:
    problem = "its folder is not known"
    if folder is not None:
        try:
            return fingerprint_of(folder, vocabulary)
        except UnknownCheckpointError as error:
            problem = str(error)
    _log.warning("the model is known by its name alone, so vLLM shares its memories with no other engine: %s", problem)
    return hashlib.sha256(f"{name}\n{sorted(vocabulary.items())}".encode("utf-8", "surrogatepass")).hexdigest()[:16]
