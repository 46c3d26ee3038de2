"""Opens the memory of the model that SGLang serves, by the variables of its environment."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack

from draftwood_memory.engines.policy import RequestPolicy
from draftwood_memory.engines.trees import TreeDrafts
from draftwood_memory.memory import Memory
from draftwood_memory.records import Int32Array
from draftwood_memory.settings.memory_settings import MemorySettings
from draftwood_tenants.engines.opening import OpenedDrafts, Publish, ServedModel


def open_drafts(
    environ: Mapping[str, str],
    model: ServedModel,
    nodes: int,
    is_live: Callable[[str], bool],
    output_of: Callable[[str], Int32Array | None],
) -> OpenedDrafts[TreeDrafts]:
    """Trees of `nodes` nodes for the requests of an engine; arguments as in `OpenedDrafts` and `TreeDrafts`.

    Raises:
        InvalidSettingError, InvalidInputError, MemoryStoreError: as `OpenedDrafts`.
    """

    def make(
        memory: Memory, settings: MemorySettings, policy: RequestPolicy, publish: Publish, stack: ExitStack
    ) -> TreeDrafts:
        return TreeDrafts(memory, settings, policy, model.vocab_size, nodes, is_live, output_of, publish)

    return OpenedDrafts("SGLang", environ, model, make)
