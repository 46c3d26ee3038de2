"""Who decides how a request is drafted for."""

from __future__ import annotations

from typing import Protocol

from draftwood_memory.engines.options import RequestChoice, RequestOptions
from draftwood_memory.engines.session import Session
from draftwood_memory.settings.memory_settings import MemorySettings


class RequestPolicy(Protocol):
    """Decides how requests are drafted for, and hears of their ends. Called from two threads, never at once."""

    def options_of(self, request_id: str, choice: RequestChoice) -> RequestOptions:
        """How a request is drafted for that writes its first token. Whatever it raises costs the request its drafts."""

    def ended(self, session: Session) -> None:
        """A request has ended, finished or aborted: the engine does not know it any more."""


class SettingsPolicy:
    """All tenants as the settings of the process say."""

    def __init__(self, settings: MemorySettings) -> None:
        self._settings = settings

    def options_of(self, request_id: str, choice: RequestChoice) -> RequestOptions:
        strategy = self._settings.strategy if choice.strategy is None else choice.strategy
        most = self._settings.max_draft_nodes
        nodes = most if choice.max_nodes is None else min(choice.max_nodes, most)
        on = choice.on and strategy != "none"
        return RequestOptions(choice.tenant, strategy, nodes if on else 0, choice.learns and choice.tenant != "")

    def ended(self, session: Session) -> None:
        """Nothing is counted."""
