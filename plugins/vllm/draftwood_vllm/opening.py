"""Opens the memory of the model that vLLM serves, by the variables of its environment."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from draftwood_memory.engines.forms.chains import ChainForm
from draftwood_memory.engines.policy import DecidedPolicy
from draftwood_tenants.engines.opening import OpenedDrafts, ServedModel
from draftwood_vllm.service_link import SOCKET_VARIABLE, Recorder


def open_drafts(
    environ: Mapping[str, str], model: ServedModel, longest: int, is_live: Callable[[str], bool]
) -> OpenedDrafts[list[list[int]]]:
    """Chains for the requests of an engine; arguments as in `OpenedDrafts` and `ChainForm`.

    If Draftwood's service runs the engine, it decides how requests are drafted for, and gets reports of the drafts.

    Raises:
        InvalidSettingError, InvalidInputError, MemoryStoreError: as `OpenedDrafts`.
    """
    path, form = environ.get(SOCKET_VARIABLE), ChainForm(longest)
    if not path:
        return OpenedDrafts("vLLM", environ, model, form, is_live)
    return OpenedDrafts("vLLM", environ, model, form, is_live, DecidedPolicy(), lambda memory: Recorder(path, memory))
