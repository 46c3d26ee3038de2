"""The live sequences of the trie strategy: each one's own index, and its latest draft."""

from __future__ import annotations

from typing import Annotated, Any, NamedTuple

import numpy as np

from draftwood_strategies.native import Int32Array
from draftwood_strategies.structs import Struct, record_dtype
from draftwood_strategies.trie.candidates import CANDIDATE, FOLLOWED, Candidates, Followed
from draftwood_strategies.trie.phrase_index import NOWHERE, WRITER, IndexArrays, PhraseIndex, Writer
from draftwood_strategies.trie.workspace import MOST_ROOTS, TrieDraft, empty_draft

_OWN_CAPACITY = 1 << 20
"""Tokens of a sequence's own index; more than any context."""
_EXPECTED = 256
"""Tokens of an answer that its own index has space for at first."""
_LEAST_NODES = 16
"""Of a draft that there is space for."""
_NO_TOKENS = np.empty(0, np.int32)

STATE = record_dtype(prompt_end=np.int64, written=np.int64, roots=np.int64, drafted=np.int64)
"""The position in its own index where a sequence's output begins, how many of its last tokens the memory learns, and
how many roots and nodes its latest draft has."""


class SequenceArrays(NamedTuple):
    """The arrays of a live sequence.

    Attributes:
        own, writer: its own index, and WRITER[1] there.
        memory_writer: WRITER[1] in the tenant's memory.
        state: STATE[1].
        followed: FOLLOWED[2], the positions that it follows in its own index and in the memory.
        roots: CANDIDATE[MOST_ROOTS], the candidates at the root of its latest draft.
        draft: space for its drafts.
    """

    own: IndexArrays
    writer: Annotated[Any, WRITER]
    memory_writer: Annotated[Any, WRITER]
    state: Annotated[Any, STATE]
    followed: Followed
    roots: Candidates
    draft: TrieDraft


class TrieSequence:
    """One live sequence: its own index, and its latest draft.

    The prompt is written into its index piece by piece (`index_prompt`), and then what the sequence wrote meanwhile.
    Nothing can be drafted before.

    Args:
        writer: its writer in the tenant's memory.
        written: how many of its last tokens the memory learns.

    Attributes:
        struct: its arrays; None until the index holds the prompt and all that was written.
    """

    def __init__(self, prompt: Int32Array, writer: Writer, written: int) -> None:
        self._prompt, self._position = prompt, 0
        self._kept: list[Int32Array] = []
        self._memory_writer = writer
        self._state = np.array([(NOWHERE, written, 0, 0)], STATE)
        self._index: PhraseIndex | None = None
        self.struct: Struct[SequenceArrays] | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of its own index."""
        return 0 if self._index is None else self._index.nbytes

    @property
    def address(self) -> int:
        """Of its `SequenceArrays`."""
        assert self.struct is not None
        return self.struct.address

    def index_prompt(self, most: int) -> int:
        """Writes up to `most` more tokens of the prompt into its own index; returns how many. Fewer is the end."""
        if self.struct is not None:
            return 0
        if self._index is None:
            self._index = PhraseIndex(_OWN_CAPACITY, self._prompt.shape[0] + _EXPECTED)
            self._writer = self._index.writer()
        piece = self._prompt[self._position : self._position + most]
        self._index.append(self._writer, piece)
        self._position += piece.shape[0]
        if piece.shape[0] < most:
            self._state["prompt_end"] = self._writer["at"] + 1
            for written in self._kept:
                self._index.append(self._writer, written)
            self._prompt, self._kept = _NO_TOKENS, []
            self.struct = Struct(
                SequenceArrays(
                    own=self._index.arrays,
                    writer=self._writer,
                    memory_writer=self._memory_writer,
                    state=self._state,
                    followed=np.array([(NOWHERE, 0), (NOWHERE, 0)], FOLLOWED),
                    roots=np.empty(MOST_ROOTS, CANDIDATE),
                    draft=empty_draft(0),
                )
            )
        return int(piece.shape[0])

    def keep(self, written: Int32Array) -> None:
        """Keeps what the sequence wrote before its prompt was indexed."""
        self._kept.append(written)
        self._state["written"] += written.shape[0]

    def reserve(self, tokens: int) -> None:
        """Makes space in its own index, which holds the prompt, for so many more tokens."""
        assert self._index is not None
        assert self.struct is not None
        self._index.reserve(tokens)
        self.struct.set(self.struct.fields._replace(own=self._index.arrays))

    def reserve_nodes(self, nodes: int) -> None:
        """Makes space for drafts of so many nodes; if there was less, the latest draft is lost."""
        assert self.struct is not None
        if self.struct.fields.draft.tokens.shape[0] < nodes:
            self.struct.set(self.struct.fields._replace(draft=empty_draft(max(nodes, _LEAST_NODES))))
            self._state["drafted"] = self._state["roots"] = 0
