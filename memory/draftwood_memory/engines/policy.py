"""Policies that resolve the drafting options of requests."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from draftwood_memory.engines.options import RequestChoice, RequestOptions, read_choice, trusted_options
from draftwood_memory.engines.session import Session
from draftwood_memory.settings import MemorySettings
from draftwood_strategies.drafting import NO_CHOICE, Drafting, resolve


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
        """The resolved options. Raises InvalidValueError."""
        server = Drafting(self._settings.strategy, (), self._settings.max_draft_nodes)
        drafting = resolve(choice.drafting, NO_CHOICE, server)
        return RequestOptions(choice.tenant, drafting, choice.learns and choice.tenant != "")

    def ended(self, session: Session) -> None:
        """Nothing is counted."""
