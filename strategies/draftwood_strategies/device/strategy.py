"""The trie strategy for a host that schedules on the CPU, with its memories and its drafts on a device.

A step waits for the device once, for its drafts. Each instance is a tenant of one arena that all share, and takes part
in it on the thread that drafts alone: what other threads let it learn is kept until its next draft.
"""

from __future__ import annotations

import itertools
import logging
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as SequenceOf
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial, wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

import numpy as np
import torch

from draftwood_strategies.arrays import Float32Array, Int32Array
from draftwood_strategies.base import Feedback, StepFeedback, Strategy
from draftwood_strategies.built_in import TrieOptions
from draftwood_strategies.device.arena import ArenaTooLargeError, DeviceSizes
from draftwood_strategies.device.launching import DeviceUnsupportedError
from draftwood_strategies.device.trie import DeviceDrafts, DeviceTrie
from draftwood_strategies.draft import DraftTree, DraftTrees
from draftwood_strategies.registry import substituted

_log = logging.getLogger(__name__)
P = ParamSpec("P")
T = TypeVar("T")
_EVERYTHING = 1 << 40
_NOTHING = np.empty(0, np.int32)
_IMPORTED = 8192
"""Recorded tokens that a memory learns in one step, about. Not tuned."""
_ALIGNED = 4
"""Numbers that each uploaded array begins at a multiple of. Kernels are compiled once for addresses that 16 divides."""
_WIDTH = 16
"""Tokens of a row that are learned at once are padded to a multiple of this, for the same reason."""


class DraftDevice:
    """The arena of a process, and its rows. What it computes waits for nothing that the model computes.

    Args:
        sizes, device, options: as of `DeviceTrie`.

    Attributes:
        trie: the arena.

    Raises:
        ArenaTooLargeError, DeviceUnsupportedError: as of `DeviceTrie`.
    """

    def __init__(self, sizes: DeviceSizes, device: torch.device, options: TrieOptions | None = None) -> None:
        self.trie = DeviceTrie(sizes, device, options)
        self.sizes = sizes
        self._stream = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)
            self._stream.wait_stream(torch.cuda.current_stream(device))
        numbers = sizes.rows * (3 * sizes.nodes + 1)
        self._drafted, self._following = torch.empty((2, numbers), dtype=torch.int32, device=device)
        self._copied = torch.empty(numbers, dtype=torch.int32, pin_memory=device.type == "cuda")
        self._tenants = map(str, itertools.count())
        self._strategies: weakref.WeakValueDictionary[str, DeviceTrieStrategy] = weakref.WeakValueDictionary()
        self.trie.leaving = partial(_take_to_host, self._strategies)
        self._dropped: deque[str] = deque()

    def queue(self) -> AbstractContextManager[object]:
        """In it, calls of `trie` are queued behind one another, and not behind what the model computes."""
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def takes(self, options: TrieOptions) -> bool:
        """Whether a memory with these options can be in the arena."""
        own = self.trie.options
        same = all(getattr(options, name) == getattr(own, name) for name in ("branch_length", "learn", "prompt_weight"))
        return same and options.capacity_tokens >= self.sizes.tenant_tokens

    def register(self, strategy: DeviceTrieStrategy) -> str:
        """A new tenant, which is forgotten when the strategy is dropped."""
        tenant = next(self._tenants)
        self._strategies[tenant] = strategy
        weakref.finalize(strategy, self._dropped.append, tenant)
        return tenant

    def forget_dropped(self) -> None:
        """Frees the regions and rows of tenants that are no more."""
        while self._dropped:
            self.trie.forget(self._dropped.popleft())

    def begin(self, tenant: str, learns: bool, backs_off: bool) -> int | None:
        """A row for a new sequence, None if all are taken."""
        row = self.trie.free_row()
        if row is not None:
            self.trie.begin(row, tenant, learns, backs_off)
        return row

    def append(self, row: int, tokens: Int32Array, *, memory: bool, counted: bool = False) -> None:
        """Goes on with what the memory has of a row, or with its own text, by `tokens`, int32[n].

        Args:
            memory: the memory; otherwise the text.
            counted: of the text, see `DeviceTrie.append_to_texts`.
        """
        if tokens.shape[0] == 0:
            return
        rows, offsets, given = self._uploaded(_int32([row]), _int32([0, tokens.shape[0]]), tokens)
        if memory:
            self.trie.append_to_memories(rows, given, offsets)
        else:
            self.trie.append_to_texts(rows, given, offsets, counted=counted)

    def begin_output(self, row: int) -> None:
        """The prompt of a row is complete."""
        self.trie.begin_outputs(*self._uploaded(_int32([row])))

    def learn(self, rows: SequenceOf[int], runs: SequenceOf[Int32Array]) -> None:
        """Each row, whose prompt is complete, has accepted its run, int32[n]."""
        if not rows:
            return
        counts = _int32([run.shape[0] for run in runs])
        tokens = np.zeros((len(rows), -(-int(counts.max()) // _WIDTH) * _WIDTH), np.int32)
        for of_row, run in zip(tokens, runs, strict=True):
            of_row[: run.shape[0]] = run
        self.trie.learn(*self._uploaded(_int32(rows), tokens, counts))

    def propose(self, rows: SequenceOf[int], budgets: Int32Array) -> DraftTrees:
        """A draft for each row, whose prompt is complete; of more than `sizes.nodes` nodes for none. Waits for the
        device.

        Args:
            budgets: int32[rows].
        """
        b, n = len(rows), self.sizes.nodes
        if b == 0:
            return DraftTrees.empty(0)
        numbers = self._drafted[: b * (3 * n + 1)]
        on_device, most = self._uploaded(_int32(rows), np.minimum(budgets, n))
        self.trie.propose(on_device, most, _drafts_in(numbers, b, n))
        copied = self._copied[: numbers.shape[0]].copy_(numbers, non_blocking=True)
        if self._stream is not None:
            self._stream.synchronize()
        return _trees(copied.numpy(), b, n)

    def follow(
        self, rows: Int32Array, sources: Int32Array, budgets: Int32Array, tokens: torch.Tensor, counts: torch.Tensor
    ) -> DeviceDrafts:
        """See `FollowedDevice`; queued behind what the model computes."""
        b, n = rows.shape[0], self.sizes.nodes
        computing = None if self._stream is None else torch.cuda.current_stream(tokens.device)
        if self._stream is not None and computing is not None:
            computing.wait_stream(self._stream)
        on_device, of_step, most = self._uploaded(rows, sources, np.minimum(budgets, n))
        self.trie.learn(on_device, tokens.index_select(0, of_step), counts.index_select(0, of_step) + 1)
        out = _drafts_in(self._following[: b * (3 * n + 1)], b, n)
        self.trie.propose(on_device, most, out)
        if self._stream is not None and computing is not None:
            self._stream.wait_stream(computing)
        return out

    def _uploaded(self, *arrays: Int32Array) -> list[torch.Tensor]:
        """Copies on the device, by one upload that the host does not wait for."""
        begins = [0, *itertools.accumulate(-(-array.size // _ALIGNED) * _ALIGNED for array in arrays)]
        numbers = np.zeros(begins[-1], np.int32)
        for begin, array in zip(begins, arrays, strict=False):
            numbers[begin : begin + array.size] = array.reshape(-1)
        on_device = self.trie.uploaded(numbers)
        return [
            on_device[begin : begin + array.size].view(array.shape)
            for begin, array in zip(begins, arrays, strict=False)
        ]


def _take_to_host(strategies: Mapping[str, DeviceTrieStrategy], tenant: str) -> None:
    strategy = strategies.get(tenant)
    if strategy is not None:
        strategy.leave_device()


def _drafts_in(numbers: torch.Tensor, rows: int, nodes: int) -> DeviceDrafts:
    """Views of int32[rows * (3 * nodes + 1)]."""
    tokens, parents, scores = numbers[: 3 * rows * nodes].view(3, rows, nodes)
    return DeviceDrafts(tokens, parents, scores.view(torch.float32), numbers[3 * rows * nodes :])


def _trees(numbers: Int32Array, rows: int, nodes: int) -> DraftTrees:
    """What `DeviceDrafts` has for so many rows, as int32[rows * (3 * nodes + 1)], without unused nodes."""
    tokens, parents, scores = numbers[: 3 * rows * nodes].reshape(3, rows, nodes)
    counts = numbers[3 * rows * nodes :]
    used = np.arange(nodes) < counts[:, None]
    offsets = np.zeros(rows + 1, np.int32)
    np.cumsum(counts, out=offsets[1:])
    drafted: Float32Array = scores.view(np.float32)[used]
    return DraftTrees(tokens[used], parents[used], drafted, offsets)


def _int32(numbers: SequenceOf[int]) -> Int32Array:
    return np.array(numbers, np.int32)


def _queued(method: Callable[Concatenate[Any, P], T]) -> Callable[Concatenate[Any, P], T]:
    """A method that calls the arena, see `DraftDevice.queue`."""

    @wraps(method)
    def call(self: Any, /, *args: P.args, **options: P.kwargs) -> T:
        with self.device.queue():
            return method(self, *args, **options)

    return call


class DeviceTrieStrategy:
    """One tenant's memory of phrases and learned weights, in an arena on a device.

    Its region may go to another tenant while it has no live sequences. What was in it is kept by the host until the
    next sequence begins, when it goes to a region again.

    Args:
        device: the arena, which takes these options.
        options: those of `TrieOptions`, by name.

    Attributes:
        backs_off: sequences that begin draft novel tokens, see `weights.Novel`.
        written: tokens that the memory ever got.

    Raises:
        ValueError: an option's value is not allowed, or differs from the arena's.
    """

    top_k = 0

    def __init__(self, device: DraftDevice, **options: Any) -> None:
        self.options = TrieOptions(**options)
        if not device.takes(self.options):
            raise ValueError(f"device drafts: the arena of {device.trie.options} does not take {self.options}")
        self.device = device
        self.backs_off = True
        self._tenant = device.register(self)
        self._lock = threading.Lock()
        self._to_import: deque[Int32Array] = deque()
        self._waiting = 0
        self._weights: torch.Tensor | None = None
        self._earlier: DeviceTrieStrategy | None = None
        self.written = 0

    @property
    @_queued
    def tokens(self) -> int:
        """How many tokens the memory holds. Waits for the device, on the thread that drafts."""
        self.catch_up(_EVERYTHING)
        return self.device.trie.tokens(self._tenant) + self._waiting

    @property
    def nbytes(self) -> int:
        """Bytes on the device of the tokens that were written, up to all of its region, which is taken as a whole."""
        region = self.device.trie.layout.memory
        return 4 * region.size * min(self.written, region.slots) // region.slots

    @_queued
    def sequences(self) -> Iterator[Int32Array]:
        """The sequences in the memory, int32[n] each, the oldest first; `learn` takes them again. Waits for the device,
        on the thread that drafts."""
        self.catch_up(_EVERYTHING)
        return iter([*self.device.trie.sequences(self._tenant), *self._to_import])

    def learn(self, tokens: Int32Array) -> None:
        """Adds a whole recorded sequence, int32[n], to the memory: with the next drafts, some thousand tokens each. On
        any thread."""
        with self._lock:
            self._to_import.append(np.array(tokens, np.int32))
            self.written += tokens.shape[0]
            self._waiting += tokens.shape[0]
            self._drop_oldest()

    def keep_learned(self, earlier: DeviceTrieStrategy) -> None:
        """The weights of `earlier` at the first draft; from then on each learns for itself. Raises TypeError for a
        strategy of the host, which it has nothing in common with."""
        if not isinstance(earlier, DeviceTrieStrategy):
            raise TypeError(f"its weights are on a device, those of {type(earlier).__name__} are not")
        self._earlier = earlier

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
        """Its weights, as `DeviceTrie.learned`; None for those from before any traffic."""
        if self._weights is None and self._earlier is not None:
            return self._earlier.weights_on_device()
        return self.device.trie.learned(self._tenant) if self._weights is None else self._weights

    def leave_device(self) -> None:
        """Takes what its region has to the host. Waits for the device."""
        self._weights = self.weights_on_device()
        held = [*self.device.trie.sequences(self._tenant)]
        with self._lock:
            self._to_import.extendleft(reversed(held))
            self._waiting += sum(map(len, held))
            self._drop_oldest()

    def start(self, prompt: Int32Array) -> DeviceTrieDrafter:
        return DeviceTrieDrafter(self, prompt, learns=True)

    def start_read_only(self, prompt: Int32Array) -> DeviceTrieDrafter:
        return DeviceTrieDrafter(self, prompt, learns=False)

    @_queued
    def begin(self, learns: bool) -> tuple[int | None, bool]:
        """A row for a new sequence, None if all are taken, and whether its memory is on the device."""
        resident = self.catch_up()
        return self.device.begin(self._tenant, learns, self.backs_off), resident

    @_queued
    def propose_all(self, drafters: SequenceOf[DeviceTrieDrafter], budgets: Int32Array) -> DraftTrees:
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
        drafters: SequenceOf[DeviceTrieDrafter],
        accepted: Int32Array,
        offsets: Int32Array,
        feedback: StepFeedback | None = None,
    ) -> None:
        """See `BatchStrategy`. The feedback is not needed."""
        rows, runs = [], []
        for drafter, written in zip(drafters, np.split(accepted, offsets[1:-1]), strict=True):
            if drafter.keep(written) and drafter.row is not None:
                rows.append(drafter.row)
                runs.append(written)
        self.device.learn(rows, runs)

    def _drop_oldest(self) -> None:
        """Of what is to be imported, all that one region cannot hold. With the lock."""
        while self._waiting > self.device.sizes.tenant_tokens and len(self._to_import) > 1:
            self._waiting -= self._to_import.popleft().shape[0]


class DeviceTrieDrafter:
    """One live sequence, in a row of the arena. Without a row it drafts nothing; without a row or a region for its
    memory, what it writes is learned as a recorded sequence when it ends.

    The prompt is written into its text piece by piece (`index_prompt`), and then what the sequence wrote meanwhile.

    Attributes:
        row: None if all were taken when it began, and once it has ended.
    """

    def __init__(self, strategy: DeviceTrieStrategy, prompt: Int32Array, learns: bool) -> None:
        self._strategy, self.device = strategy, strategy.device
        self.row, resident = strategy.begin(learns)
        self._learns_prompt = learns and strategy.options.learn != "outputs"
        self._learns_output = learns and strategy.options.learn != "prompts"
        self._prompt = prompt
        self._in_memory = self._in_text = 0
        self._complete = self.row is None
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
        self.device.append(self.row, piece, memory=False, counted=self._strategy.options.learn == "both")
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
        self._strategy.observe_all([self], accepted, np.array([0, accepted.shape[0]], np.int32))

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
    """In it, instances of `trie` with the default options draft in an arena, and all others on the host. All do if the
    arena does not fit the device's memory, or kernels cannot run there; the reason is logged.

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

    def make(**options: Any) -> Strategy | None:
        return DeviceTrieStrategy(arena, **options) if arena.takes(TrieOptions(**options)) else None

    with substituted("trie", make):
        yield arena
