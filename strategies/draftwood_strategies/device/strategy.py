"""Strategies for a host that schedules on the CPU, with their memories and drafts on a device: `trie`, `recycling`, and
`hybrid` of these two.

A step waits for the device once, for its drafts. Each instance is a tenant of one arena that all share, and takes part
in it on the thread that drafts alone: what other threads let it learn is kept until its next draft.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator
from collections.abc import Sequence as SequenceOf
from contextlib import ExitStack, contextmanager
from functools import partial, wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

import numpy as np
import torch

from draftwood_strategies.arrays import Int32Array
from draftwood_strategies.base import Feedback, StepFeedback, Strategy
from draftwood_strategies.device.arena import ArenaTooLargeError, DeviceSizes
from draftwood_strategies.device.draft_device import DeviceParts, DraftDevice
from draftwood_strategies.device.launching import DeviceUnsupportedError
from draftwood_strategies.draft import DraftTree, DraftTrees
from draftwood_strategies.registry import substituted
from draftwood_strategies.successors import WIDTH

_log = logging.getLogger(__name__)
P = ParamSpec("P")
T = TypeVar("T")
_EVERYTHING = 1 << 40
_NOTHING = np.empty(0, np.int32)
_IMPORTED = 8192
"""Recorded tokens that a memory learns in one step, about. Not tuned."""


def _queued(method: Callable[Concatenate[Any, P], T]) -> Callable[Concatenate[Any, P], T]:
    """A method that calls the arena, see `DraftDevice.queue`."""

    @wraps(method)
    def call(self: Any, /, *args: P.args, **options: P.kwargs) -> T:
        with self.device.queue():
            return method(self, *args, **options)

    return call


class DeviceStrategy:
    """One tenant's memory of phrases, successor table and learned weights, as far as its strategy has them, in an arena
    on a device.

    Its region may go to another tenant while it has no live sequences. What was in it is kept by the host until the
    next sequence begins, when it goes to a region again.

    Args:
        device: the arena, which takes these parts.
        name: of the strategy.
        options: its own, by name.

    Attributes:
        parts: what it drafts from.
        backs_off: sequences that begin draft novel tokens, see `weights.Novel`; not if there is a successor table.
        written: tokens that the memory ever got.

    Raises:
        ValueError: an option's value is not allowed, or the arena does not take it.
    """

    def __init__(self, device: DraftDevice, name: str = "trie", **options: Any) -> None:
        parts = DeviceParts.of(name, options)
        if parts is None or not device.takes(parts):
            raise ValueError(f"device drafts: the arena of {device.trie.options} does not take {name} with {options}")
        self.parts = parts
        self.device = device
        self.top_k = 0 if parts.table is None else WIDTH
        self.backs_off = parts.table is None
        self._tenant = device.register(self)
        self._lock = threading.Lock()
        self._to_import: deque[Int32Array] = deque()
        self._waiting = 0
        self._weights: torch.Tensor | None = None
        self._earlier: DeviceStrategy | None = None
        self.written = 0

    @property
    @_queued
    def tokens(self) -> int:
        """How many tokens the memory holds. Waits for the device, on the thread that drafts."""
        self.catch_up(_EVERYTHING)
        return self.device.trie.tokens(self._tenant) + self._waiting

    @property
    def nbytes(self) -> int:
        """Bytes on the device: of the tokens that were written, up to all of its region, which is taken as a whole, and
        of the successor table and the weights once it had a region."""
        trie = self.device.trie
        region, has_table = trie.layout.memory, self.parts.table is not None
        learned = has_table and (self._weights is not None or trie.has_region(self._tenant))
        return 4 * (region.size * min(self.written, region.slots) // region.slots + learned * trie.layout.weights_size)

    @_queued
    def sequences(self) -> Iterator[Int32Array]:
        """The sequences in the memory, int32[n] each, the oldest first; `learn` takes them again. Waits for the device,
        on the thread that drafts."""
        self.catch_up(_EVERYTHING)
        return iter([*self.device.trie.sequences(self._tenant), *self._to_import])

    def learn(self, tokens: Int32Array) -> None:
        """Adds a whole recorded sequence, int32[n], to the memory if it has one: with the next drafts, some thousand
        tokens each. On any thread."""
        if self.parts.trie is None:
            return
        with self._lock:
            self._to_import.append(np.array(tokens, np.int32))
            self.written += tokens.shape[0]
            self._waiting += tokens.shape[0]
            self._drop_oldest()

    def keep_learned(self, earlier: DeviceStrategy) -> None:
        """The weights and the successor table of `earlier` at the first draft; from then on each learns
        for itself. Raises TypeError for a strategy of the host, which it has nothing in common with."""
        if not isinstance(earlier, DeviceStrategy):
            raise TypeError(f"its weights are on a device, those of {type(earlier).__name__} are not")
        self._earlier = earlier

    def set_model_table(self, rows: Int32Array) -> None:
        """See `UsesModelTable`; the arena has one for all."""
        if self.device.mixture is not None:
            with self.device.queue():
                self.device.mixture.set_model_table(rows)

    @_queued
    def catch_up(self, tokens: int | None = None) -> bool:
        """Learns more of the recorded sequences, if there is a region for them. On the thread that drafts.

        Args:
            tokens: of about so many; None for `_IMPORTED`.

        Returns:
            Whether it has a region.
        """
        self.device.forget_dropped()
        trie = self.device.trie
        if not trie.claim(self._tenant):
            return False
        if self._earlier is not None:
            self._weights, self._earlier = self._earlier.weights_on_device(), None
        if self._weights is not None:
            trie.set_learned(self._tenant, self._weights)
            self._weights = None
        runs, left = [], _IMPORTED if tokens is None else tokens
        with self._lock:
            while self._to_import and left > 0:
                runs.append(self._to_import.popleft())
                left -= runs[-1].shape[0]
                self._waiting -= runs[-1].shape[0]
        if runs:
            trie.import_runs(self._tenant, runs)
        return True

    def import_waiting(self) -> None:
        """Learns more of the recorded sequences, if there are any. On the thread that drafts."""
        if self._to_import:
            self.catch_up()

    @_queued
    def weights_on_device(self) -> torch.Tensor | None:
        """Its weights and its table, as `DeviceTrie.learned`; None for those from before any traffic."""
        if self._weights is None and self._earlier is not None:
            return self._earlier.weights_on_device()
        return self.device.trie.learned(self._tenant) if self._weights is None else self._weights

    def leave_device(self) -> None:
        """Takes what its region has to the host. Waits for the device."""
        learned = self.weights_on_device()
        self._weights = None if learned is None else learned.cpu()
        held = [*self.device.trie.sequences(self._tenant)]
        with self._lock:
            self._to_import.extendleft(reversed(held))
            self._waiting += sum(map(len, held))
            self._drop_oldest()

    def start(self, prompt: Int32Array) -> DeviceSequence:
        return DeviceSequence(self, prompt, learns=True)

    def start_read_only(self, prompt: Int32Array) -> DeviceSequence:
        return DeviceSequence(self, prompt, learns=False)

    @_queued
    def begin(self, prompt: Int32Array, learns: bool) -> tuple[int | None, bool]:
        """A row for a new sequence, None if all are taken, and whether its memory is on the device."""
        resident = self.catch_up()
        return self.device.begin(self._tenant, self.parts, prompt, learns, self.backs_off), resident

    @_queued
    def propose_all(self, drafters: SequenceOf[DeviceSequence], budgets: Int32Array) -> DraftTrees:
        """See `BatchStrategy`. A draft has `DeviceSizes.nodes` nodes at most, and none without a row."""
        self.import_waiting()
        for drafter in drafters:
            drafter.index_prompt(_EVERYTHING)
        asked = [i for i, drafter in enumerate(drafters) if drafter.row is not None]
        rows = [drafter.row for drafter in drafters if drafter.row is not None]
        return DraftTrees.scattered([(asked, self.device.propose(rows, budgets[asked]))], len(drafters))

    @_queued
    def observe_all(
        self,
        drafters: SequenceOf[DeviceSequence],
        accepted: Int32Array,
        offsets: Int32Array,
        feedback: StepFeedback | None = None,
    ) -> None:
        """See `BatchStrategy`. The trie does not need the feedback."""
        taking, runs, in_texts = [], [], []
        for i, (drafter, written) in enumerate(zip(drafters, np.split(accepted, offsets[1:-1]), strict=True)):
            in_text = drafter.keep(written)
            if drafter.row is not None and (in_text or self.parts.table is not None):
                taking.append(i)
                runs.append(written)
                in_texts.append(in_text)
        if self.parts.table is None or not taking:
            feedback = None
        elif feedback is not None and len(taking) < len(drafters):
            feedback = feedback.part(taking)
        rows = [row for i in taking if (row := drafters[i].row) is not None]
        self.device.learn(rows, runs, in_texts, feedback)

    def _drop_oldest(self) -> None:
        """Of what is to be imported, all that one region cannot hold. With the lock."""
        while self._waiting > self.device.sizes.tenant_tokens and len(self._to_import) > 1:
            self._waiting -= self._to_import.popleft().shape[0]


class DeviceSequence:
    """One live sequence, in a row of the arena. Without a row it drafts nothing; without a row or a region for its
    memory, what it writes is learned as a recorded sequence when it ends.

    The prompt is written into its text piece by piece (`index_prompt`), and then what the sequence wrote meanwhile.
    Without a trie it has no text.

    Attributes:
        row: None if all were taken when it began, and once it has ended.
    """

    def __init__(self, strategy: DeviceStrategy, prompt: Int32Array, learns: bool) -> None:
        self._strategy, self.device = strategy, strategy.device
        self.row, resident = strategy.begin(prompt, learns)
        trie = strategy.parts.trie
        self._learns_prompt = learns and trie is not None and trie.learn != "outputs"
        self._learns_output = learns and trie is not None and trie.learn != "prompts"
        self._counted = trie is not None and trie.learn == "both"
        self._prompt = prompt
        self._in_memory = self._in_text = 0
        self._complete = self.row is None or trie is None
        self._kept: list[Int32Array] = []
        self._recorded: list[Int32Array] | None = None
        if self.row is None or not resident:
            self._recorded = [prompt] if self._learns_prompt else []

    @_queued
    def index_prompt(self, max_tokens: int) -> int:
        """See `PromptIndexer`. The memory comes first if it learns prompts."""
        learned = self._learn_prompt(max_tokens)
        return learned + (self._index_prompt(max_tokens - learned) if learned < max_tokens else 0)

    def _learn_prompt(self, max_tokens: int) -> int:
        if self.row is None or not self._learns_prompt:
            return 0
        piece = self._prompt[self._in_memory : self._in_memory + max_tokens]
        self.device.append(self.row, piece, memory=True)
        self._in_memory += piece.shape[0]
        self._strategy.written += piece.shape[0]
        return int(piece.shape[0])

    def _index_prompt(self, max_tokens: int) -> int:
        if self.row is None or self._complete:
            return 0
        piece = self._prompt[self._in_text : self._in_text + max_tokens]
        self.device.append(self.row, piece, memory=False, counted=self._counted)
        self._in_text += piece.shape[0]
        if piece.shape[0] < max_tokens:
            self._complete = True
            self.device.begin_output(self.row)
            for written in self._kept:
                self.device.append(self.row, written, memory=False, counted=True)
            self._prompt, self._kept = _NOTHING, []
            self._in_memory = self._in_text = 0
        return int(piece.shape[0])

    def keep(self, written: Int32Array) -> bool:
        """Takes what it wrote; returns whether its row learns that now. Not before its prompt is indexed: then the
        memory has it at once, and the text after the prompt."""
        self._strategy.import_waiting()
        if self._learns_output and self._recorded is not None:
            self._recorded.append(written.copy())
        elif self._learns_output:
            self._strategy.written += written.shape[0]
        if self.row is None or self._complete:
            return self.row is not None
        self._learn_prompt(_EVERYTHING)  # comes before the answer in the memory
        if self._learns_output:
            self.device.append(self.row, written, memory=True)
        self._kept.append(written.copy())
        return False

    def propose(self, budget: int) -> DraftTree:
        return self._strategy.propose_all([self], np.array([budget], np.int32))[0]

    def observe(self, accepted: Int32Array, feedback: Feedback | None) -> None:
        step = None if feedback is None else StepFeedback.of(feedback)
        self._strategy.observe_all([self], accepted, np.array([0, accepted.shape[0]], np.int32), step)

    @_queued
    def close(self) -> None:
        """The memory keeps what was learned. The row is free."""
        row, self.row = self.row, None
        if row is not None:
            self.device.trie.end(row)
        if self._recorded:
            self._strategy.learn(np.concatenate(self._recorded))


@contextmanager
def drafts_on_device(sizes: DeviceSizes, device: str) -> Iterator[DraftDevice | None]:
    """In it, instances of `trie`, `recycling` and `hybrid` of both, with the default options, draft in an arena, the
    latter two if its sizes have contexts. All others draft on the host, and all if the arena does not fit the
    device's memory, or kernels cannot run there; the reason is logged.

    Args:
        device: of torch, by name.
    """
    try:
        arena = DraftDevice(sizes, torch.device(device))
    except (ArenaTooLargeError, DeviceUnsupportedError) as error:
        _log.warning("%s: drafts are made by the host", error)
        yield None
        return
    _log.info(
        "device drafts: %d rows and the memories of %d tenants, %d tokens each, take %.2f GB of %s",
        sizes.rows,
        sizes.tenants,
        sizes.tenant_tokens,
        sizes.nbytes / 1e9,
        device,
    )

    def make(name: str, **options: Any) -> Strategy | None:
        parts = DeviceParts.of(name, options)
        return DeviceStrategy(arena, name, **options) if parts is not None and arena.takes(parts) else None

    with ExitStack() as stack:
        for name in ("trie", "recycling", "hybrid"):
            # A hybrid on the host reads the table of its recycling.
            stack.enter_context(substituted(name, partial(make, name), as_source=name == "trie"))
        yield arena
