"""Policies that resolve the drafting options of requests."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from draftwood_memory.engines.options import RequestChoice, RequestOptions, read_choice, trusted_options
from draftwood_memory.engines.session import Session
from draftwood_memory.settings.memory_settings import MemorySettings


class RequestPolicy(Protocol):
    """Resolves drafting options, and is notified when requests end. Called from two threads, never at once."""

    def options_of(self, request_id: str, given: Mapping[str, Any] | None) -> RequestOptions:
        """How a request is drafted for that is seen first. Whatever it raises costs the request its drafts.

        Args:
            given: what the request carries, other keys among it.
        """

    def ended(self, session: Session) -> None:
        """A request that wrote something has ended, finished or aborted: the engine does not know it any more."""


class DecidedPolicy:
    """As Draftwood's service has decided, which runs the engine: see `trusted_options`."""

    def options_of(self, request_id: str, given: Mapping[str, Any] | None) -> RequestOptions:
        return trusted_options(given)

    def ended(self, session: Session) -> None:
        """The service counts."""


class SettingsPolicy:
    """All tenants as the settings of the process say.

    Args:
        tenant: of requests that name none; "" for none.
    """

    def __init__(self, settings: MemorySettings, tenant: str) -> None:
        self._settings = settings
        self._tenant = tenant

    def options_of(self, request_id: str, given: Mapping[str, Any] | None) -> RequestOptions:
        return self.decide(read_choice(given, self._tenant))

    def decide(self, choice: RequestChoice) -> RequestOptions:
        """The resolved options."""
        strategy = self._settings.strategy if choice.strategy is None else choice.strategy
        most = self._settings.max_draft_nodes
        nodes = most if choice.max_nodes is None else min(choice.max_nodes, most)
        on = choice.on and strategy != "none"
        return RequestOptions(choice.tenant, strategy, nodes if on else 0, choice.learns and choice.tenant != "")

    def ended(self, session: Session) -> None:
        """Nothing is counted."""
