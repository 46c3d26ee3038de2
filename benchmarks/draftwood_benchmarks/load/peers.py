"""Engines without a service in `bench load`, a peer or ours: one process for each kind of drafts, each measured in
windows of its own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from draftwood_benchmarks.load.closed_loop import RequestResult, Window
from draftwood_benchmarks.peers.process import OUR_ENGINE, Peer

_FIRST_SECONDS = 2.0
"""Of the requests before those that are measured."""


class PeerState(NamedTuple):
    """What a window of the peer was measured with.

    Attributes:
        engine: as in `--peer`, or `OUR_ENGINE`.
        drafts: as in `--peer-drafts`.
        warm: its drafts knew answers to other prompts.
    """

    engine: str
    drafts: str
    warm: bool


class MeasuredPeers:
    """Measures the processes of engines.

    Args:
        prompts: token ids of the measured ones.
        others: token ids of those that memories learn from.
        seconds: of a window.
        most: requests at once, in any window.

    Attributes:
        found: the joined windows of each concurrency and state.
    """

    def __init__(
        self,
        peers: Sequence[Peer],
        prompts: Sequence[Sequence[int]],
        others: Sequence[Sequence[int]],
        max_tokens: int,
        seconds: float,
        most: int,
    ) -> None:
        self.found: dict[tuple[int, PeerState], Window] = {}
        self._peers = peers
        self._prompts = prompts
        self._others = others
        self._max_tokens = max_tokens
        self._seconds = seconds
        self._windows = 0
        for peer in peers:
            peer.load_test(prompts, max_tokens, most, _FIRST_SECONDS, memory="first")  # first answers are slower

    def measure(self, level: int) -> None:
        """A window of each state."""
        for peer, state in self._states():
            self._windows += 1
            memory = f"{self._windows}"  # a new one: no window knows the answers of an earlier one
            if state.warm:
                peer.learn(self._others, self._max_tokens, memory)
            found = peer.load_test(self._prompts, self._max_tokens, level, self._seconds, memory)
            timed = [  # as if each had been sent at 0
                RequestResult(0.0, one.ttft, one.ttft + one.decode_seconds, one.first_tokens, one.tokens)
                for one in found.requests
            ]
            window = Window(found.seconds, found.tokens, timed, steps=found.steps)
            self.found[level, state] = Window.joined([self.found.get((level, state), Window()), window])

    def fastest(self, level: int) -> Window | None:
        """What ours is compared with: the peer's window with the most tokens per second; None without a peer."""
        found = [one for (of, state), one in self.found.items() if of == level and state.engine != OUR_ENGINE]
        return max(found, key=lambda window: window.tokens_per_s, default=None)

    def _states(self) -> Iterator[tuple[Peer, PeerState]]:
        """A peer without a memory has one state, as if it were warm."""
        for peer in self._peers:
            if not peer.has_memory or self._others:
                yield peer, PeerState(peer.name, peer.drafts, True)
            if peer.has_memory:
                yield peer, PeerState(peer.name, peer.drafts, False)
