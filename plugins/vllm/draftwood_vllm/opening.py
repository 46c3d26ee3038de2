"""Opens the memory of the model that vLLM serves, by the variables of its environment."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from draftwood_memory.engines.drafts import Host
from draftwood_memory.engines.policy import DecidedPolicy
from draftwood_strategies.draft_engine.engine import Verifies
from draftwood_tenants.engines import OpenedDrafts, ServedModel
from draftwood_vllm.service_link import SOCKET_VARIABLE, Recorder


def open_drafts(
    environ: Mapping[str, str], model: ServedModel, longest: int, is_live: Callable[[str], bool]
) -> OpenedDrafts:
    """Chains of at most `longest` tokens for the requests of an engine; other arguments as in `OpenedDrafts`, `Host`.

    If Draftwood's service runs the engine, it decides how requests are drafted for, and gets reports of the drafts.

    Raises:
        InvalidSettingError, InvalidInputError, MemoryStoreError: as `OpenedDrafts`.
    """
    path, host = environ.get(SOCKET_VARIABLE), Host(Verifies.CHAINS, longest, is_live)
    if not path:
        return OpenedDrafts("vLLM", environ, model, host)
    return OpenedDrafts("vLLM", environ, model, host, DecidedPolicy(), lambda memory: Recorder(path, memory))
