"""What an engine allocates: a runner, its KV memory in pages, and how many sequences that is for."""

from __future__ import annotations

import logging

from draftwood_model_runner.engine_config import EngineConfig
from draftwood_model_runner.errors import InvalidValueError
from draftwood_model_runner.loading.adoption import configured_context
from draftwood_model_runner.loading.model import LoadedModel
from draftwood_model_runner.redecoding import PREFILL_TOKENS
from draftwood_model_runner.runners.base import PageStates, Runner, StatefulRunner
from draftwood_model_runner.scheduling.kv_pool import KVPool
from draftwood_model_runner.scheduling.page_table import AttentionWindow

_log = logging.getLogger(__name__)

_USUAL_CONTEXT = 4096
"""Tokens of a running request, drafts included, that the KV cache has by default on a CPU. Not tuned: most requests are
shorter, and longer ones find the place that these leave. On a GPU nothing else needs the memory."""
_BYTES = {"float32": 4.0, "bfloat16": 2.0, "float16": 2.0, "int8": 1.0, "int4": 0.5}
"""Of a weight."""


def check_capacity(path_or_id: str, max_context: int | None, config: EngineConfig) -> None:
    """Refuses a capacity before the model is loaded if its config.json is enough to tell that it does not suffice. How
    much a model needs whose layers have a window is known only after it was tried.

    Raises:
        InvalidValueError: the model has no context of `max_context` tokens, or the KV cache cannot hold a full context.
        ModelNotFoundError: there is no config.json that transformers knows.
    """
    context, window = configured_context(path_or_id, max_context)
    if config.kv_cache_tokens is not None and not window:
        _require_capacity(config.kv_cache_tokens, context + config.max_draft_nodes)


def allocate(model: LoadedModel, config: EngineConfig) -> tuple[Runner, KVPool, int]:
    """Makes the runner of a model with its memory, and logs what that takes.

    Returns:
        The runner, its pages, and how many sequences can run at once.

    Raises:
        InvalidValueError: the KV cache, as configured or as memory allows, cannot hold one full context, or the device
            has no memory for it.
    """
    full, window = model.max_context + config.max_draft_nodes, None
    if model.factory.window is not None:
        window = AttentionWindow(model.factory.window, max(config.prefill_chunk, PREFILL_TOKENS))
    least = full if window is None else min(full, window.needs(config.max_draft_nodes))
    capacity = config.kv_cache_tokens
    if capacity is None:
        each = min(full, _USUAL_CONTEXT) if model.device == "cpu" else full
        capacity = model.factory.default_kv_tokens(least, -(-config.max_running * each // least))
    _require_capacity(capacity, least)
    runner = model.factory.runner(capacity, config.threads, config.max_running)
    states = runner.states if isinstance(runner, StatefulRunner) else None
    tokens = runner.pages * runner.page_size
    kv_bytes = tokens * model.factory.kv_bytes_per_token
    weights = f"{model.parameters / 1e6:.0f} million weights ({model.weights})"
    if model.weights in _BYTES:
        weights += f", {model.parameters * _BYTES[model.weights] / 1e9:.2f} GB"
    _log.info("memory: %s; KV cache of %d tokens, %.2f GB", weights, tokens, kv_bytes / 1e9)
    pool = KVPool(runner.pages, runner.page_size, config.prefix_cache, states, window)
    return runner, pool, config.max_running if states is None else _running_with(states, config.max_running)


def _require_capacity(tokens: int, least: int) -> None:
    if tokens < least:
        raise InvalidValueError("kv_cache_tokens", tokens, f"one full context with its drafts needs {least}")


def _running_with(states: PageStates, wanted: int) -> int:
    """How many sequences can run at once. Logs what their states take."""
    fitting = min(wanted, states.sequences)
    each = states.bytes_per_sequence
    _log.info("recurrent layers: states of %d sequences, %.2f GB", fitting, fitting * each / 1e9)
    if fitting < wanted:
        _log.warning("memory holds the recurrent states of %d sequences; so many run at once at most", fitting)
    return fitting
