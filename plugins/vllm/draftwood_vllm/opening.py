"""Opens the memory of the model that an engine serves, by the variables of its environment."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path

from draftwood_memory.engines.drafts import EngineDrafts
from draftwood_memory.engines.policy import DecidedPolicy, RequestPolicy
from draftwood_memory.settings.memory_settings import read_environment
from draftwood_memory.settings.opening import opened_memory
from draftwood_tenants.engines.opening import (
    DEFAULT_STRATEGY,
    described,
    fingerprint,
    policy_of,
    publisher,
    tenant_of,
)
from draftwood_vllm.service_link import SOCKET_VARIABLE, Recorder

_log = logging.getLogger("draftwood")


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
        settings = read_environment(environ, strategy=DEFAULT_STRATEGY)
        tenant = tenant_of(environ, settings)
        with ExitStack() as stack:
            memory = stack.enter_context(opened_memory(settings, fingerprint("vLLM", folder, name, vocabulary)))
            publish = publisher(environ, stack)
            policy: RequestPolicy
            if path := environ.get(SOCKET_VARIABLE):
                recorder = stack.enter_context(Recorder(path, memory))
                policy, tell = DecidedPolicy(), {"tell": recorder.tell}
                origin = "Draftwood's service decides for each request"
            else:
                policy, tell = policy_of(environ, settings, tenant, stack), {}
                origin = described(settings, tenant)
            self.drafts = EngineDrafts(memory, settings, policy, vocab_size, longest, is_live, publish, **tell)
            stack.callback(self.drafts.close)
            self.drafts.start()
            self._store = stack.pop_all()
        _log.info("drafting with %s: %s", settings.strategy, origin)

    def close(self) -> None:
        """Sends what was learned to the store, and stops. Blocks for seconds at most."""
        self._store.close()


def checkpoint_of(name: str, revision: str | None) -> Path | None:
    """The folder of a model's checkpoint; None if it is not on this machine."""
    if Path(name).is_dir():
        return Path(name)
    try:
        from huggingface_hub import snapshot_download

        return Path(snapshot_download(name, revision=revision, local_files_only=True))
    except Exception:
        return None
