"""Drafting options of another engine's requests, by the configuration of their tenants and the arms of experiments."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from draftwood_memory.engines.options import RequestChoice, RequestOptions, read_choice
from draftwood_memory.engines.session import Session
from draftwood_memory.settings.memory_settings import MemorySettings
from draftwood_tenants.catalog import Catalog
from draftwood_tenants.config import LearningScope, TenantConfig
from draftwood_tenants.drafting import DraftChoice, drafting_of
from draftwood_tenants.engines.measuring import outcome_of
from draftwood_tenants.experiments.arm_assignment import ArmAssigner, ArmAssignment
from draftwood_tenants.experiments.outcomes import Outcome

_log = logging.getLogger("draftwood")
_NO_TENANT = TenantConfig()
_MAX_WARNED = 100
"""Tenants of which it is logged that their requests choose what they may not."""

Record = Callable[[ArmAssignment, Outcome], None]
"""Counts a request in its arm. Returns at once."""


class TenantPolicy:
    """A `draftwood_memory.engines.policy.RequestPolicy`.

    Args:
        catalog: what is known of tenants.
        settings: hold where a tenant has nothing of its own.
        tenant: of requests that name none; "" for none.
    """

    def __init__(self, catalog: Catalog, settings: MemorySettings, tenant: str, record: Record) -> None:
        self._catalog = catalog
        self._assigner = ArmAssigner(catalog)
        self._settings = settings
        self._tenant = tenant
        self._record = record
        self._assigned: dict[str, ArmAssignment] = {}
        self._warned: set[str] = set()

    def options_of(self, request_id: str, given: Mapping[str, Any] | None) -> RequestOptions:
        """Raises ConfigurationUnknownError, UnknownStrategyError, InvalidSettingError."""
        return self.decide(request_id, read_choice(given, self._tenant))

    def decide(self, request_id: str, choice: RequestChoice) -> RequestOptions:
        """How a request with these options is drafted for. Raises ConfigurationUnknownError, UnknownStrategyError."""
        config = self._catalog.config_of(choice.tenant) if choice.tenant else _NO_TENANT
        draft = DraftChoice(choice.strategy, choice.max_nodes, choice.on)
        if draft.overrides and not config.allow_draft_override:
            self._warn(choice.tenant)
            draft = DraftChoice()
        assignment = self._assign(request_id, choice, overridden=draft.overrides)
        if assignment is not None:
            config = replace(config, drafting=assignment.arm.drafting)
        drafting = drafting_of(draft, config, self._settings.strategy, self._settings.max_draft_nodes)
        if assignment is not None:
            self._assigned[request_id] = assignment
        learns = choice.learns and choice.tenant != "" and config.learning.scope is not LearningScope.NOTHING
        return RequestOptions(
            tenant=choice.tenant,
            strategy=drafting.strategy,
            max_nodes=drafting.max_nodes,
            learns=learns,
            strategy_options=drafting.options,
            arm="" if assignment is None else assignment.label,
            overrides=replace(config.learning.overrides, forked=assignment is not None and assignment.arm.forked),
            with_prompt=config.learning.with_prompts,
        )

    def ended(self, session: Session) -> None:
        assignment = self._assigned.pop(session.request.request_id, None)
        if assignment is not None and (found := outcome_of(session)) is not None:
            self._record(assignment, found)

    def _assign(self, request_id: str, choice: RequestChoice, *, overridden: bool) -> ArmAssignment | None:
        if not choice.tenant:
            return None
        return self._assigner.assign(
            choice.tenant, request_id=request_id, session=choice.session, overridden=overridden
        )

    def _warn(self, tenant: str) -> None:
        if tenant not in self._warned and len(self._warned) < _MAX_WARNED:
            self._warned.add(tenant)
            _log.warning("what requests say of drafts is ignored: tenants/%s does not allow it", tenant)
