"""Opens the memory of the model that SGLang serves, by the variables of its environment."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

from draftwood_memory.engines.trees import TreeDrafts
from draftwood_memory.records import Int32Array
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

_log = logging.getLogger("draftwood")


class Model(NamedTuple):
    """What is served.

    Attributes:
        folder: of the checkpoint; None if it is not known.
        name: in place of a fingerprint where there is none.
        vocabulary: the tokenizer's.
        vocab_size: draft tokens are below it.
    """

    folder: Path | None
    name: str
    vocabulary: Mapping[str, int]
    vocab_size: int


class Opened:
    """Drafts of an engine, with the store that they use.

    Args:
        environ: variables `DRAFTWOOD_...`.
        nodes, is_live, output_of: as in `TreeDrafts`.

    Raises:
        InvalidSettingError: a variable has a value that is not allowed.
        InvalidInputError: the tenants file cannot be read, or is wrong.
        MemoryStoreError: the embedded store does not start.
    """

    def __init__(
        self,
        environ: Mapping[str, str],
        model: Model,
        nodes: int,
        is_live: Callable[[str], bool],
        output_of: Callable[[str], Int32Array | None],
    ) -> None:
        settings = read_environment(environ, strategy=DEFAULT_STRATEGY)
        tenant = tenant_of(environ, settings)
        known_as = fingerprint("SGLang", model.folder, model.name, model.vocabulary)
        with ExitStack() as stack:
            memory = stack.enter_context(opened_memory(settings, known_as))
            publish = publisher(environ, stack)
            policy = policy_of(environ, settings, tenant, stack)
            self.drafts = TreeDrafts(memory, settings, policy, model.vocab_size, nodes, is_live, output_of, publish)
            stack.callback(self.drafts.close)
            self.drafts.start()
            self._store = stack.pop_all()
        _log.info("drafting with %s: %s", settings.strategy, described(settings, tenant))

    def close(self) -> None:
        """Sends what was learned to the store, and stops. Blocks for seconds at most."""
        self._store.close()
