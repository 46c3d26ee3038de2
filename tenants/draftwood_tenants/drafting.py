"""The drafting of a request, from its own options, its tenant's configuration and the process's settings."""

from __future__ import annotations

from typing import NamedTuple

from draftwood_strategies.options import Options
from draftwood_strategies.registry import options_of
from draftwood_tenants.config import TenantConfig

NO_DRAFTS = "none"


class DraftChoice(NamedTuple):
    """A request's own drafting options; None leaves an option to its tenant."""

    strategy: str | None = None
    max_nodes: int | None = None
    enabled: bool = True

    @property
    def overrides(self) -> bool:
        """Whether any option is set; such a request takes part in no experiment."""
        return self.strategy is not None or self.max_nodes is not None or not self.enabled


class Drafting(NamedTuple):
    """Strategy and options, and the draft nodes of a step at most."""

    strategy: str
    options: Options
    max_nodes: int


def drafting_of(choice: DraftChoice, config: TenantConfig, strategy: str, max_nodes: int) -> Drafting:
    """The tenant's options are for its strategy, not for another one that the request names.

    Args:
        config: the tenant's, with the drafting of the request's arm if it is in an experiment.
        strategy, max_nodes: of the process, where the tenant has none.

    Raises:
        UnknownStrategyError: there is no strategy of this name.
    """
    usual = config.drafting.strategy or strategy
    name = usual if choice.strategy is None else choice.strategy
    if name == NO_DRAFTS or not choice.enabled:
        return Drafting(NO_DRAFTS, (), 0)
    most = max_nodes if config.drafting.max_nodes is None else min(config.drafting.max_nodes, max_nodes)
    chosen = dict(config.drafting.options if name == usual else ())
    if config.learning.with_prompts and "learn" in options_of(name, chosen):
        chosen["learn"] = "both"
    nodes = most if choice.max_nodes is None else min(choice.max_nodes, most)
    return Drafting(name, tuple(sorted(chosen.items())), nodes)
