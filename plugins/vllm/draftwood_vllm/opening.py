"""Opens the memory of the model that vLLM serves, by the variables of its environment."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack

from draftwood_memory.engines.drafts import EngineDrafts
from draftwood_memory.engines.policy import DecidedPolicy, RequestPolicy
from draftwood_memory.memory import Memory
from draftwood_memory.settings.memory_settings import MemorySettings
from draftwood_tenants.engines.opening import OpenedDrafts, Publish, ServedModel
from draftwood_vllm.service_link import SOCKET_VARIABLE, Recorder


def open_drafts(
    environ: Mapping[str, str], model: ServedModel, longest: int, is_live: Callable[[str], bool]
) -> OpenedDrafts[EngineDrafts]:
    """Chains for the requests of an engine; arguments as in `OpenedDrafts` and `EngineDrafts`.

    Where Draftwood's service runs the engine, it decides how requests are drafted for, and is told what was drafted.

    Raises:
        InvalidSettingError, InvalidInputError, MemoryStoreError: as `OpenedDrafts`.
    """
    path = environ.get(SOCKET_VARIABLE)

    def make(
        memory: Memory, settings: MemorySettings, policy: RequestPolicy, publish: Publish, stack: ExitStack
    ) -> EngineDrafts:
        if not path:
            return EngineDrafts(memory, settings, policy, model.vocab_size, longest, is_live, publish)
        tell = stack.enter_context(Recorder(path, memory)).tell
        return EngineDrafts(memory, settings, policy, model.vocab_size, longest, is_live, publish, tell)

    return OpenedDrafts("vLLM", environ, model, make, DecidedPolicy() if path else None)
