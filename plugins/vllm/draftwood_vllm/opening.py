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
from draftwood_memory.engines.figures import Point
from draftwood_memory.engines.fingerprint import UnknownCheckpointError, fingerprint_of
from draftwood_memory.engines.metrics import MetricFiles, folder_of
from draftwood_memory.engines.policy import DecidedPolicy, RequestPolicy, SettingsPolicy
from draftwood_memory.settings.memory_settings import ENV_PREFIX, MemorySettings, cache_folder, read_environment
from draftwood_memory.settings.opening import opened_memory, store_client, store_keys
from draftwood_tenants.engines.following import TenantThread
from draftwood_tenants.engines.policy import TenantPolicy
from draftwood_tenants.file import SETTING as TENANTS_FILE
from draftwood_tenants.followed import FollowedTenants
from draftwood_tenants.reading import ServerLimits
from draftwood_vllm.service_link import SOCKET_VARIABLE, Recorder

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
            memory = stack.enter_context(opened_memory(settings, fingerprint(folder, name, vocabulary)))
            publish = _publisher(environ, stack)
            policy: RequestPolicy
            if path := environ.get(SOCKET_VARIABLE):
                recorder = stack.enter_context(Recorder(path, memory))
                policy, tell = DecidedPolicy(), {"tell": recorder.tell}
            else:
                policy, tell = _policy(environ, settings, tenant, stack), {}
            self.drafts = EngineDrafts(memory, settings, policy, vocab_size, longest, is_live, publish, **tell)
            stack.callback(self.drafts.close)
            self.drafts.start()
            self._store = stack.pop_all()
        _log.info("drafting with %s: %s", settings.strategy, _described(settings, tenant, SOCKET_VARIABLE in environ))

    def close(self) -> None:
        """Sends what was learned to the store, and stops. Blocks for seconds at most."""
        self._store.close()


def tenant_of(environ: Mapping[str, str], settings: MemorySettings) -> str:
    """The tenant of requests that name none; "" for none."""
    return environ.get(TENANT_VARIABLE) or (ONLY_TENANT if settings.store == "memory" else "")


def _publisher(environ: Mapping[str, str], stack: ExitStack) -> Callable[[list[Point]], None] | None:
    """Shows metrics in those of the server; None if they cannot be shown."""
    folder = folder_of(environ)
    if folder is None:
        return None
    try:
        files = MetricFiles(folder)
    except (ImportError, OSError) as error:
        _log.warning("metrics of drafts are not shown: %s", error)
        return None
    stack.callback(files.close)
    return files.write


def _policy(environ: Mapping[str, str], settings: MemorySettings, tenant: str, stack: ExitStack) -> RequestPolicy:
    """Tenants' configurations and experiments, followed until `stack` is closed; what the settings say without any."""
    file = environ.get(TENANTS_FILE_VARIABLE)
    client = store_client(settings)
    if client is None and not file:
        return SettingsPolicy(settings, tenant)
    limits = ServerLimits(settings.strategy, settings.max_draft_nodes, settings.memory_tokens, settings.memory_bytes)
    keys, cache = store_keys(settings), cache_folder(environ)
    followed = FollowedTenants(client, keys, Path(file) if file else None, cache, limits)
    thread = TenantThread(followed, f"{gethostname()}/{os.getpid()}")
    stack.callback(thread.close)
    thread.start(settings.store_timeout + 1.0)
    return TenantPolicy(followed.catalog, settings, tenant, thread.record)


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
