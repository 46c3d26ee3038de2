"""Tenants and experiments in the process of an engine that is not ours: what its plug-ins have in common.

`OpenedDrafts` opens the memory of the served model by the variables of the environment. `TenantPolicy` decides how a
request is drafted for, and counts it in the arm of its experiment. `TenantThread` follows tenants beside the engine,
which must not wait.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import secrets
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack, suppress
from dataclasses import replace
from multiprocessing.util import Finalize
from pathlib import Path
from socket import gethostname
from typing import Any, Generic, NamedTuple, Protocol, Self, TypeVar

from draftwood_memory.engines.draft_metrics import DRAFTING_UP
from draftwood_memory.engines.drafts import DraftListener, EngineDrafts, Host, Publish
from draftwood_memory.engines.fingerprint import UnknownCheckpointError, fingerprint_of
from draftwood_memory.engines.metrics import MetricFiles, folder_of
from draftwood_memory.engines.options import RequestChoice, RequestOptions, read_choice
from draftwood_memory.engines.policy import RequestPolicy, SettingsPolicy
from draftwood_memory.engines.session import Session
from draftwood_memory.memory import Memory, opened_memory
from draftwood_memory.settings import (
    ENV_PREFIX,
    MemorySettings,
    cache_folder,
    read_environment,
    store_client,
    store_keys,
)
from draftwood_strategies.drafting import NO_CHOICE, Drafting, resolve
from draftwood_tenants.catalog import Catalog
from draftwood_tenants.config import LearningScope, TenantConfig
from draftwood_tenants.experiments.arms import ArmAssigner, ArmAssignment, Counting, target_of
from draftwood_tenants.experiments.counts import Origin, Outcome
from draftwood_tenants.file import SETTING as TENANTS_FILE
from draftwood_tenants.followed import FollowedTenants
from draftwood_tenants.reading import ServerLimits
from draftwood_tenants.resources.follower import end

_log = logging.getLogger("draftwood")

TENANTS_FILE_VARIABLE = f"{ENV_PREFIX}{TENANTS_FILE.upper()}"
TENANT_VARIABLE = "DRAFTWOOD_TENANT"
"""The tenant of requests that name none, as of the calls of Draftwood's client."""
ONLY_TENANT = "default"
"""The tenant of all requests where the environment names neither a tenant nor a store."""
DEFAULT_STRATEGY = "trie"
"""Unless the environment says otherwise. Engines show no predictions beside the tokens that are written, so what a
hybrid adds to it has nothing to learn from: it accepted 0 to 2% less on each of seven traces (`draftwood bench replay
--chains 16 --cut 0.1`)."""
_LAST_SECONDS = 2.0
"""For the last counts at the end of a process."""
_NO_TENANT = TenantConfig()
_MAX_WARNED = 100
"""Tenants of which it is logged that their requests choose what they may not."""

Record = Callable[[ArmAssignment, Outcome], None]
"""Counts a request in its arm. Returns at once."""


class TenantThread:
    """Follows tenants and experiments, and writes the counts of experiments each second.

    Args:
        replica: names this process among those on the store.
    """

    def __init__(self, followed: FollowedTenants, replica: str) -> None:
        self._followed = followed
        origin = Origin(replica, secrets.token_hex(8))
        self._counting = Counting(followed.counts, origin, lambda: map(target_of, followed.catalog.experiments()))
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop: asyncio.Event | None = None
        self._looked = threading.Event()
        self._thread = threading.Thread(target=self._run, name="draftwood tenants", daemon=True)

    def start(self, seconds: float) -> None:
        """Follows from now on. Waits until the store was looked at once, for so many seconds at most."""
        self._thread.start()
        self._looked.wait(seconds)

    def record(self, assignment: ArmAssignment, outcome: Outcome) -> None:
        """Counts a request. For any thread; returns at once."""
        with suppress(RuntimeError):  # the thread has ended
            if self._loop is not None:
                self._loop.call_soon_threadsafe(self._counting.record, assignment, outcome)

    def close(self) -> None:
        """Writes what is counted, and ends. Blocks for seconds at most."""
        with suppress(RuntimeError):
            if self._loop is not None and self._stop is not None:
                self._loop.call_soon_threadsafe(self._stop.set)
        if self._thread.ident is not None:
            self._thread.join(3 * _LAST_SECONDS)

    def _run(self) -> None:
        try:
            asyncio.run(self._follow())
        except Exception:
            _log.exception("tenants and experiments are not followed any more; what is known of them stays in use")
        finally:
            self._looked.set()

    async def _follow(self) -> None:
        self._stop = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        writing: asyncio.Task[None] | None = None
        try:
            await self._followed.start()
            writing = asyncio.create_task(self._counting.follow())
            self._looked.set()
            await self._stop.wait()
        finally:
            await end([writing])
            await asyncio.wait([asyncio.create_task(self._counting.write())], timeout=_LAST_SECONDS)
            await self._followed.close()


class TenantPolicy:
    """A `draftwood_memory.engines.policy.RequestPolicy`.

    Args:
        catalog: what is known of tenants.
        settings: hold where a tenant has nothing of its own.
        tenant: of requests that name none; "" for none.
    """

    def __init__(self, catalog: Catalog, settings: MemorySettings, tenant: str, record: Record) -> None:
        self._catalog = catalog
        self._assigner = ArmAssigner(catalog)
        self._settings = settings
        self._tenant = tenant
        self._record = record
        self._assigned: dict[str, ArmAssignment] = {}
        self._warned: set[str] = set()

    def options_of(self, request_id: str, given: Mapping[str, Any] | None) -> RequestOptions:
        """Raises ConfigurationUnknownError, InvalidValueError."""
        return self.decide(request_id, read_choice(given, self._tenant))

    def decide(self, request_id: str, choice: RequestChoice) -> RequestOptions:
        """How a request with these options is drafted for. Raises ConfigurationUnknownError, InvalidValueError."""
        config = self._catalog.config_of(choice.tenant) if choice.tenant else _NO_TENANT
        drafting = choice.drafting
        if drafting != NO_CHOICE and not config.allow_draft_override:
            self._warn(choice.tenant)
            drafting = NO_CHOICE
        assignment = None
        if choice.tenant:
            overridden = drafting != NO_CHOICE
            assignment = self._assigner.assign(
                choice.tenant, request_id=request_id, session=choice.session, overridden=overridden
            )
        configured = config.drafting if assignment is None else assignment.arm.drafting
        server = Drafting(self._settings.strategy, (), self._settings.max_draft_nodes)
        resolved = resolve(drafting, configured, server, learns_prompts=config.learning.with_prompts)
        if assignment is not None:
            self._assigned[request_id] = assignment
        learns = choice.learns and choice.tenant != "" and config.learning.scope is not LearningScope.NOTHING
        return RequestOptions(
            tenant=choice.tenant,
            drafting=resolved,
            learns=learns,
            arm="" if assignment is None else assignment.label,
            overrides=replace(config.learning.overrides, forked=assignment is not None and assignment.arm.forked),
            with_prompt=config.learning.with_prompts,
        )

    def ended(self, session: Session) -> None:
        assignment = self._assigned.pop(session.request.request_id, None)
        if assignment is not None and (outcome := outcome_of(session)) is not None:
            self._record(assignment, outcome)

    def _warn(self, tenant: str) -> None:
        if tenant not in self._warned and len(self._warned) < _MAX_WARNED:
            self._warned.add(tenant)
            _log.warning("what requests say of drafts is ignored: tenants/%s does not allow it", tenant)


def outcome_of(session: Session) -> Outcome | None:
    """What is counted of a request that has ended; None for one that wrote nothing.

    The worker sees neither when a request arrived nor whether it finished or was aborted. So there is no TTFT, the
    first token is the arrival, and a request that was aborted counts with what it wrote: time and tokens belong
    together. Tokens behind one that ends the request are of the last step's draft, and are dropped.
    """
    if not session.output:
        return None
    stats, last = session.stats, session.output[-1].tolist()
    ends = next((at for at, token in enumerate(last) if token in session.stop_token_ids), len(last) - 1)
    beyond = len(last) - 1 - ends
    return Outcome(
        arrived_at=time.time() - (time.perf_counter() - stats.first_token_at),
        tokens=max(sum(piece.shape[0] for piece in session.output[1:]) - beyond, 0),
        steps=stats.decode_steps - 1,
        decode_seconds=stats.last_token_at - stats.first_token_at,
        draft_nodes=stats.draft_tokens,
        accepted_tokens=stats.accepted_tokens - max(beyond - 1, 0),  # the last token of a step is the model's own
    )


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


class Parts(NamedTuple):
    """What drafts of an engine are made of: arguments of `EngineDrafts`."""

    memory: Memory
    settings: MemorySettings
    policy: RequestPolicy
    publish: Publish | None
    on_drafts: DraftListener


class Drafts(Protocol):
    """Drafts of an engine that are opened once, and closed at the end."""

    def start(self) -> None: ...

    def close(self) -> None: ...


DraftsT = TypeVar("DraftsT", bound=Drafts)


class Opened(Generic[DraftsT]):
    """Drafts of an engine, with the store that they use. They are closed when the process ends, if not before.

    Args:
        engine: its name, for the log.
        environ: variables `DRAFTWOOD_...`.
        make: makes the drafts, which are then started.
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
        make: Callable[[Parts], DraftsT],
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
            self.drafts = make(Parts(memory, settings, policy, publish, on_drafts))
            stack.callback(self.drafts.close)
            self.drafts.start()
            # Processes of multiprocessing end without what `atexit` has.
            self._close = Finalize(None, stack.pop_all().close, exitpriority=10)
        _log.info("drafting with %s: %s", settings.strategy, origin)

    def close(self) -> None:
        """Sends what was learned to the store, and stops. Blocks for seconds at most."""
        self._close()


class OpenedDrafts(Opened[EngineDrafts]):
    """Drafts that are made on the host. Arguments and errors are those of `Opened`.

    Args:
        host: as in `EngineDrafts`.
    """

    def __init__(
        self,
        engine: str,
        environ: Mapping[str, str],
        model: ServedModel,
        host: Host,
        policy: RequestPolicy | None = None,
        listener: Callable[[Memory], AbstractContextManager[DraftListener]] | None = None,
    ) -> None:
        def make(parts: Parts) -> EngineDrafts:
            memory, settings, policy, publish, on_drafts = parts
            return EngineDrafts(memory, settings, policy, model.vocab_size, host, publish, on_drafts)

        super().__init__(engine, environ, model, make, policy, listener)


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
