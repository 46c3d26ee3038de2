"""The trie's form for GPUs, for a replay."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from draftwood_benchmarks.harness.report import BenchmarkError
from draftwood_benchmarks.replay import Recording
from draftwood_model_runner.errors import InvalidInputError
from draftwood_strategies import Strategy
from draftwood_strategies.built_in import TrieOptions
from draftwood_strategies.device.arena import MOST_NODES, ArenaTooLargeError, DeviceSizes
from draftwood_strategies.trie.phrase_index import LEAST_TOKENS, TOKENS_PER_BLOCK


def check_device_drafts(strategy: str, budgets: Sequence[int], chains: bool) -> None:
    """Raises InvalidInputError: there is no such form of a replay."""
    if strategy != "trie":
        raise InvalidInputError("--device-drafts", None, f"strategy {strategy} has no form for GPUs, trie does")
    if chains:
        raise InvalidInputError("--device-drafts", None, "it replays trees, without --chains and --peer")
    if max(budgets) > MOST_NODES:
        raise InvalidInputError("--budget", max(budgets), f"drafts on a device have at most {MOST_NODES} nodes")


def device_trie(options: Mapping[str, Any], recordings: Sequence[Recording], budget: int) -> Strategy:
    """A trie in an arena of its own, with space for these recordings, or for as many tokens as a host's trie holds.

    Args:
        options: of the strategy.

    Raises:
        InvalidInputError, DeviceUnsupportedError: as of `DeviceTrie`.
        BenchmarkError: the arena does not fit the device's memory.
    """
    import torch  # takes seconds, and only this needs it

    from draftwood_strategies.device.strategy import DeviceTrieStrategy, DraftDevice

    lengths = [prompt.size + output.size for prompt, output in recordings]
    padded = sum(lengths) + 2 * TOKENS_PER_BLOCK * len(lengths)
    sizes = DeviceSizes(
        rows=1,
        row_tokens=max(LEAST_TOKENS, *lengths),
        tenants=1,
        tenant_tokens=max(LEAST_TOKENS, min(TrieOptions.capacity_tokens, 2 * padded)),
        nodes=budget,
    )
    try:
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        return DeviceTrieStrategy(DraftDevice(sizes, device, TrieOptions(**options)), **options)
    except ArenaTooLargeError as error:
        raise BenchmarkError(str(error)) from error
