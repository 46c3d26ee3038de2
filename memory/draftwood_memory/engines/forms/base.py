"""In which form an engine verifies drafts: see `chains` and `trees`."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from typing import NamedTuple, Protocol, TypeVar

from draftwood_memory.engines.session import Row, Session, Step
from draftwood_strategies.budgeting.draft_account import DraftAccount
from draftwood_strategies.budgeting.guarded_drafter import IndexingBudget

Drafts_co = TypeVar("Drafts_co", covariant=True)


class DecodeRow(NamedTuple):
    """A request that wrote in the engine's step, which is row `row_index` of it."""

    row_index: int
    row: Row
    session: Session


class ChargedDraft(NamedTuple):
    """A draft that a step verified: whose account is charged, and how many tokens were accepted and drafted."""

    account: DraftAccount
    accepted: int
    drafted: int


class DraftForm(Protocol[Drafts_co]):
    """Makes the drafts of a step, and charges them with what it takes.

    Attributes:
        session_class: of the requests.
    """

    @property
    def session_class(self) -> type[Session]: ...

    def reset(self) -> None:
        """Forgets the steps so far, which were made up to compile what real ones need."""

    def record_step_time(self, step: Step, seconds: float) -> None:
        """Learns from a step that was measured."""

    def charge(self, step: Step, seconds: float | None, drafts: SequenceOf[ChargedDraft]) -> None:
        """Charges drafts with the time of the step that verified them; `seconds` is None if it was not measured."""

    def propose(self, rows: int, decoding: SequenceOf[DecodeRow], indexing: IndexingBudget) -> Drafts_co:
        """The drafts of the next step, which has `rows` rows.

        Args:
            indexing: how much of prompts may be indexed for it.
        """

    def before_end(self, session: Session) -> None:
        """A request is about to end."""
