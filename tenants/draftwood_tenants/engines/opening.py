"""What plug-ins for engines open alike: the memory of the model that is served, by the variables of the environment."""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack
from multiprocessing.util import Finalize
from pathlib import Path
from socket import gethostname
from typing import Generic, NamedTuple, Self

from draftwood_memory.engines.draft_metrics import DRAFTING_UP
from draftwood_memory.engines.drafts import DraftListener, Drafts, EngineDrafts, Publish
from draftwood_memory.engines.fingerprint import UnknownCheckpointError, fingerprint_of
from draftwood_memory.engines.forms.base import DraftForm
from draftwood_memory.engines.metrics import MetricFiles, folder_of
from draftwood_memory.engines.policy import RequestPolicy, SettingsPolicy
from draftwood_memory.memory import Memory
from draftwood_memory.settings.files import store_keys
from draftwood_memory.settings.memory_settings import ENV_PREFIX, MemorySettings, cache_folder, read_environment
from draftwood_memory.settings.opening import opened_memory, store_client
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
DEFAULT_STRATEGY = "trie"
"""Unless the environment says otherwise. Engines show no predictions beside the tokens that are written, so what a
hybrid adds to it has nothing to learn from: it accepted 0 to 2% less on each of seven traces (`draftwood bench replay
--chains 16 --cut 0.1`)."""


class ServedModel(NamedTuple):
    """What an engine serves.

    Attributes:
        folder: of the checkpoint; None if it is not known.
        name: in place of a fingerprint where there is none.
        vocabulary: the tokenizer's; empty if there is none.
        vocab_size: draft tokens are below it.
    """

    folder: Path | None
    name: str
    vocabulary: Mapping[str, int]
    vocab_size: int

    @classmethod
    def of(cls, path: str, revision: str | None, vocabulary: Mapping[str, int], vocab_size: int) -> Self:
        """A model that the engine was given by a folder, or by a name and revision of Hugging Face."""
        return cls(checkpoint_of(path, revision), f"{path} {revision}", vocabulary, vocab_size)


class OpenedDrafts(Generic[Drafts]):
    """Drafts of an engine, with the store that they use. They are closed when the process ends, if not before.

    Args:
        engine: its name, for the log.
        environ: variables `DRAFTWOOD_...`.
        form, is_live: as in `EngineDrafts`.
        policy: decides how requests are drafted for; None for what tenants and settings say.
        listener: opens the listener of drafts, as in `EngineDrafts`; closed after them.

    Attributes:
        drafts: those that are open.

    Raises:
        InvalidSettingError: a variable has a value that is not allowed.
        InvalidInputError: the tenants file cannot be read, or is wrong.
        MemoryStoreError: the embedded store does not start.
    """

    def __init__(
        self,
        engine: str,
        environ: Mapping[str, str],
        model: ServedModel,
        form: DraftForm[Drafts],
        is_live: Callable[[str], bool],
        policy: RequestPolicy | None = None,
        listener: Callable[[Memory], AbstractContextManager[DraftListener]] | None = None,
    ) -> None:
        settings = read_environment(environ, strategy=DEFAULT_STRATEGY)
        tenant = tenant_of(environ, settings)
        known_as = fingerprint(engine, model.folder, model.name, model.vocabulary)
        with ExitStack() as stack:
            memory = stack.enter_context(opened_memory(settings, known_as))
            publish = publisher(environ, stack)
            origin = described(settings, tenant) if policy is None else "Draftwood's service decides for each request"
            policy = policy or policy_of(environ, settings, tenant, stack)
            on_drafts: DraftListener = (
                (lambda sessions: None) if listener is None else stack.enter_context(listener(memory))
            )
            self.drafts = EngineDrafts(memory, settings, policy, model.vocab_size, form, is_live, publish, on_drafts)
            stack.callback(self.drafts.close)
            self.drafts.start()
            # Processes of multiprocessing end without what `atexit` has.
            self._close = Finalize(None, stack.pop_all().close, exitpriority=10)
        _log.info("drafting with %s: %s", settings.strategy, origin)

    def close(self) -> None:
        """Sends what was learned to the store, and stops. Blocks for seconds at most."""
        self._close()


def tenant_of(environ: Mapping[str, str], settings: MemorySettings) -> str:
    """The tenant of requests that name none; "" for none."""
    return environ.get(TENANT_VARIABLE) or (ONLY_TENANT if settings.store == "memory" else "")


def publisher(environ: Mapping[str, str], stack: ExitStack) -> Publish | None:
    """Shows metrics in those of the engine's server, until `stack` is closed; None if they cannot be shown."""
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


def show_failure(environ: Mapping[str, str]) -> None:
    """Shows in the metrics of the engine's server that this process drafts nothing. Never raises."""
    try:
        if publish := publisher(environ, ExitStack()):
            publish([(DRAFTING_UP, {}, 0.0)])
    except Exception as error:
        _log.warning("metrics do not show that nothing is drafted: %s", error)


def policy_of(environ: Mapping[str, str], settings: MemorySettings, tenant: str, stack: ExitStack) -> RequestPolicy:
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


def described(settings: MemorySettings, tenant: str) -> str:
    """Where drafts come from, for the log. Without the store's address, which may hold a password."""
    unnamed = f'requests that name no tenant are of tenant "{tenant}"' if tenant else ""
    unnamed = unnamed or "requests that name no tenant draft from their own text and share nothing"
    if settings.store != "memory":
        return f"memories are kept in the store and shared with all that use it; {unnamed}"
    return (
        f"from what this process wrote, kept in its memory alone; {unnamed}; set {ENV_PREFIX}STORE to share and keep it"
    )


def fingerprint(engine: str, folder: Path | None, name: str, vocabulary: Mapping[str, int]) -> str:
    """What the memories of a model are known by; for a model without a checkpoint that can be read, its name."""
    problem = "its folder is not known"
    if folder is not None:
        try:
            return fingerprint_of(folder, vocabulary)
        except UnknownCheckpointError as error:
            problem = str(error)
    _log.warning(
        "the model is known by its name alone, so %s shares its memories with no other engine: %s", engine, problem
    )
    return hashlib.sha256(f"{name}\n{sorted(vocabulary.items())}".encode("utf-8", "surrogatepass")).hexdigest()[:16]


def checkpoint_of(name: str, revision: str | None) -> Path | None:
    """The folder of a model's checkpoint; None if it is not on this machine."""
    if Path(name).is_dir():
        return Path(name)
    try:
        from huggingface_hub import snapshot_download

        return Path(snapshot_download(name, revision=revision, local_files_only=True))
    except Exception:
        return None
