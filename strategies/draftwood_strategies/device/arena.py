"""Where everything lies in the arena, the one int32 tensor that all kernels read and write.

A region for each row's own text and for each tenant's memory holds a phrase index (see `trie.phrase_index`), the ways
of whose hash table are in the links here: a position links to the `LINKED` occurrences before it, so that a search
loads eight at a time. Weights are whole numbers in units of `2 ** -UNIT_BITS`, those of votes by their logarithms: sums
of whole numbers do not depend on the order, so each GPU of a tensor-parallel group learns the same. Other real numbers
are the bits of a float32.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

from draftwood_strategies import successors
from draftwood_strategies.mixing.candidates import CHANCE_BINS, LEVELS
from draftwood_strategies.trie.phrase_index import ORDERS, TOKENS_PER_BLOCK
from draftwood_strategies.trie.retrieval import KINDS, LONGEST
from draftwood_strategies.trie.weights import COUNTED, FEATURES, ODDS

LINKED = 8
"""Earlier occurrences that a position links to, of the phrase of each order."""
UNIT_BITS = 20
"""A weight is a multiple of 2 ** -20."""


def whole_log(factor: float) -> int:
    """The weight of a vote's factor."""
    return round(math.log(factor) * (1 << UNIT_BITS))


MOST_NODES = 64
DEEPEST = 32
"""Bounds of drafts on the device: kernels hold a level of a draft in registers."""

CANDIDATES = 256
"""Lanes of a draft: candidates at the root (194 at most), and those of widened nodes (60 at most)."""
POOL = 512
"""Children of a level among which the best are chosen, at most."""
CONTEXT = 64
"""Space for a context, of which the last 33 tokens are compared; the newest token is the first."""
STATE = 16
"""Numbers of a row's state, at the offsets below."""
REGION, LEARNS, PROMPT_END, WRITTEN, TEXT_AT, MEMORY_AT, OWNER = range(7)
FOLLOWED_TEXT, FOLLOWED_MEMORY, DRAFTED, BACKS_OFF = range(7, 11)
"""Of a row: its tenant's region, -1 for none; 1 if that learns from it; the position in its text where its output
begins, `NOWHERE` before; how many of its last tokens the memory has; its last positions in text and memory, `NOWHERE`
for none; the number of its blocks in the memory; the positions that it follows; how many nodes its latest draft has;
and 1 if novel tokens are drafted, see `trie.weights.Novel`."""
TEXT, MEMORY, RECORDED = range(3)
"""What is appended to: the rows' own texts; the tenants' memories, by rows; a memory, whole recorded sequences."""

CURSOR, USED, TOKENS = range(3)
RING = 32
"""Numbers of a region's ring, at these offsets: the block to claim next, blocks ever in use, and tokens stored."""


class ArenaTooLargeError(ValueError):
    """The arena does not fit the device's memory; the text has both sizes."""


@dataclass(frozen=True)
class DeviceSizes:
    """How much the arena holds.

    Attributes:
        rows: live sequences at most.
        row_tokens: tokens of a sequence's own text that are kept, the latest.
        tenants: tenants whose memories are on the device at once.
        tenant_tokens: tokens of a tenant's memory, start marks included; the oldest leave first.
        nodes: of a draft, at most.
        depth: of a draft of the trie, at most.
        contexts: of a tenant's successor table, a power of two; those written longest ago leave first. 0 for none: then
            nothing is mixed.

    Raises:
        ValueError: a size is not allowed; the text begins with its name.
    """

    rows: int
    row_tokens: int
    tenants: int
    tenant_tokens: int
    nodes: int = MOST_NODES
    depth: int = DEEPEST
    contexts: int = 0

    def __post_init__(self) -> None:
        least = 4 * TOKENS_PER_BLOCK
        for name, low, high in (
            ("rows", 1, 4096),
            ("row_tokens", least, 1 << 24),
            ("tenants", 1, 1 << 16),
            ("tenant_tokens", least, 1 << 26),
            ("nodes", 1, MOST_NODES),
            ("depth", 1, DEEPEST),
        ):
            value = getattr(self, name)
            if not low <= value <= high:
                raise ValueError(f"{name}: {value} is not allowed; it must be from {low} to {high}")
        least, most = successors.SuccessorTable.LEAST, 1 << 24
        if self.contexts and (not least <= self.contexts <= most or self.contexts & (self.contexts - 1)):
            allowed = f"it must be 0, or a power of 2 from {least} to {most}"
            raise ValueError(f"contexts: {self.contexts} is not allowed; {allowed}")

    @property
    def nbytes(self) -> int:
        """Bytes of the arena."""
        return 4 * Layout(self).size


@dataclass(frozen=True)
class Region:
    """A phrase index of so many blocks: the offsets of its parts, and its size, in numbers.

    The log int32[slots]; links int32[slots, orders, LINKED]; of each block the next, the previous and the owner,
    int32[blocks] each; the ring; and heads int32[orders, buckets].
    """

    blocks: int

    @property
    def slots(self) -> int:
        return self.blocks * TOKENS_PER_BLOCK

    @property
    def buckets(self) -> int:
        """Of an order's hash table: as many as the host's index of this size has."""
        return 1 << ((self.slots - 1).bit_length() - 1)

    @property
    def links(self) -> int:
        return self.slots

    @property
    def next(self) -> int:
        return self.links + self.slots * len(ORDERS) * LINKED

    @property
    def ring(self) -> int:
        return self.next + 3 * self.blocks

    @property
    def heads(self) -> int:
        return self.ring + RING

    @property
    def size(self) -> int:
        return _padded(self.heads + len(ORDERS) * self.buckets)


FEATURES_AT = 0
ESCAPES_AT = KINDS * FEATURES
ODDS_AT = ESCAPES_AT + LONGEST + 1
ADDED = ODDS_AT + ODDS
"""A tenant's weights: logarithms of the factors of votes, int32[KINDS, FEATURES], and of the escapes; then the odds.
`ADDED` is their number, and as many are what a step adds to them. Behind both come `NOVEL_AT` tokens and counts."""
NOVEL_AT = 2 * ADDED
WEIGHTS_AT_ONCE = 1024
"""Weights that a program of `update_weights` adds to."""
WEIGHTS = NOVEL_AT + 2 * COUNTED + 1
"""Numbers of a tenant's weights of the trie: the novel tokens int32[COUNTED], their counts float32[COUNTED] and the sum
of all."""

RANKS_AT = 0
MIXED_ESCAPES_AT = LEVELS * (successors.ORDERS + 1) * successors.ORDERS * successors.STEADY_BINS * successors.WIDTH
TRUST_AT = MIXED_ESCAPES_AT + LEVELS * (successors.ORDERS + 1)
BIAS_AT = TRUST_AT + LEVELS
SEEN_AT = BIAS_AT + LEVELS * CHANCE_BINS
MIXED = SEEN_AT + LEVELS * (successors.ORDERS + 1)
"""A tenant's weights of the mixture, see `mixing.candidates.Weights`, of one source besides the table; the tokens seen
are counts. `MIXED` is their number, and as many are what a step adds to them. `CLOCK_AT` is in how many steps the table
was written."""
CLOCK_AT = 2 * MIXED
CLAIMED = successors.COLUMNS
TABLE_COLUMNS = successors.COLUMNS + 1
"""A row of a tenant's table has one more column than the host's: which of a step's writers has it."""

NODES_AT_ONCE = 16
"""Nodes of a verified tree that a program writes into the table."""
TAIL, TOPS, HAS_DRAFT, TOPS_AT = 0, successors.ORDERS, successors.ORDERS + 1, 8
"""Of a row that mixes: its last tokens, the newest first; how many nodes its latest top tokens are of; 1 if it drafted
since it learned; and those tokens, int32[nodes + 1, WIDTH]. Behind them come the rows of the table that a step writes,
and the hashes of their contexts, int32[nodes + 1, successors.ORDERS] each."""


class Layout:
    """The offsets of all parts of an arena of these sizes, in numbers of four bytes, each a multiple of 128 bytes.

    Attributes:
        text, memory: the regions of rows and of tenants.
        mixture, table: where the weights of the mixture, and the successor table, begin in a tenant's weights.
        targets_at, hashes_at: where the numbers of a row that mixes begin that a step writes its table by.
        scratch_size: numbers of a row's scratch space.
    """

    def __init__(self, sizes: DeviceSizes) -> None:
        self.sizes = sizes
        self.text = Region(_even(-(-sizes.row_tokens // TOKENS_PER_BLOCK)))
        self.memory = Region(_even(-(-sizes.tenant_tokens // TOKENS_PER_BLOCK)))
        self.mixture = _padded(WEIGHTS)
        self.table = self.mixture + _padded(CLOCK_AT + 1)
        self.weights_size = self.table + sizes.contexts * TABLE_COLUMNS if sizes.contexts else _padded(WEIGHTS)
        verified = sizes.nodes + 1
        self.targets_at = TOPS_AT + verified * successors.WIDTH
        self.hashes_at = self.targets_at + verified * successors.ORDERS
        self.mixed_size = _padded(self.hashes_at + verified * successors.ORDERS) if sizes.contexts else 0
        self.roots_size = 2 * CANDIDATES
        self.draft_size = 5 * sizes.nodes
        self.scratch_size = _padded(SCRATCH)

    @cached_property
    def memories(self) -> int:
        """int32[tenants, memory.size]; the texts, int32[rows, text.size], come first."""
        return self.sizes.rows * self.text.size

    @cached_property
    def weights(self) -> int:
        """int32[tenants + 1, weights_size], the last of which are those of rows whose tenant has no region."""
        return self.memories + self.sizes.tenants * self.memory.size

    @cached_property
    def states(self) -> int:
        """int32[rows, STATE]."""
        return self.weights + (self.sizes.tenants + 1) * self.weights_size

    @cached_property
    def roots(self) -> int:
        """int32[rows, 2, CANDIDATES]: positions and features of the candidates at the root of the latest draft."""
        return _padded(self.states + self.sizes.rows * STATE)

    @cached_property
    def drafts(self) -> int:
        """int32[rows, 5, nodes]: tokens, parents, supports, and as float32 shares and scores of the latest draft."""
        return self.roots + self.sizes.rows * self.roots_size

    @cached_property
    def misses(self) -> int:
        """int32[rows]: the token that the votes missed in a step, `NOWHERE` for none."""
        return self.drafts + self.sizes.rows * self.draft_size

    @cached_property
    def scratch(self) -> int:
        """int32[rows, scratch_size]. Nothing in it outlives a launch."""
        return self.mixed + self.sizes.rows * self.mixed_size

    @cached_property
    def mixed(self) -> int:
        """int32[rows, mixed_size]: what the latest draft of the mixture needs, and the next one."""
        return _padded(self.misses + self.sizes.rows)

    @cached_property
    def size(self) -> int:
        return self.scratch + self.sizes.rows * self.scratch_size


SCRATCH = 24576
"""Numbers of a program's scratch space."""


def _even(blocks: int) -> int:
    return blocks + (blocks & 1)


def _padded(numbers: int) -> int:
    return -(-numbers // 32) * 32
