"""How a request is drafted for: what it, its tenant and the server say, and whose word counts.

The precedence is the same in the service and in every plug-in: the request's own choice comes first, then the arm of an
experiment or the configuration of the tenant, then the settings of the process, whose maximum always holds.
"""

from __future__ import annotations

from dataclasses import dataclass

from draftwood_errors import InvalidValueError
from draftwood_strategies.options import Options
from draftwood_strategies.registry import how_loaded, options_of, strategy_names

NO_DRAFTS = "none"
"""The strategy that drafts nothing."""


@dataclass(frozen=True, slots=True)
class DraftChoice:
    """What a request, or the configuration of a tenant or an arm, says of drafting; None leaves it to the next level.

    Hashable: equal ones share the instance of their strategy.

    Attributes:
        strategy: a registered name.
        options: that the strategy is made with; it accepts them.
        max_nodes: draft nodes of a step and request; 0 for no drafts.
        enabled: False for no drafts, whatever the strategy.
    """

    strategy: str | None = None
    options: Options = ()
    max_nodes: int | None = None
    enabled: bool = True


NO_CHOICE = DraftChoice()


@dataclass(frozen=True, slots=True)
class Drafting:
    """How a request is drafted for, as it reaches its drafter.

    Attributes:
        strategy: a registered name; `NO_DRAFTS` for none.
        options: (name, value) pairs in the order of their names, which the strategy is made with.
        max_nodes: draft nodes of a step; 0 for no drafts.
    """

    strategy: str = NO_DRAFTS
    options: Options = ()
    max_nodes: int = 0


UNDRAFTED = Drafting()


def require_strategy(field: str, name: str) -> None:
    """Raises InvalidValueError for a name that is not registered."""
    if name not in (names := strategy_names()):
        raise InvalidValueError(field, name, f"it must be one of {', '.join(names)}{how_loaded(name)}")


def resolve(
    request: DraftChoice, configured: DraftChoice, server: Drafting, *, learns_prompts: bool = False
) -> Drafting:
    """How a request is drafted for. A number above what its tenant or the server allows is lowered to that.

    Args:
        configured: of the request's arm if it is in an experiment, else of its tenant. Its options are for its own
            strategy, not for another one that the request names.
        server: what holds where nothing else is said.
        learns_prompts: a strategy that can learn prompts learns them, too.

    Raises:
        InvalidValueError: the request's strategy is not registered, or its number of nodes is negative.
    """
    if request.strategy is not None:
        require_strategy("drafting.strategy", request.strategy)
    if request.max_nodes is not None and request.max_nodes < 0:
        raise InvalidValueError("drafting.max_nodes", request.max_nodes, "it must be at least 0")
    usual = configured.strategy or server.strategy
    strategy = usual if request.strategy is None else request.strategy
    if strategy == NO_DRAFTS or not request.enabled:
        return UNDRAFTED
    options = dict(configured.options if strategy == usual else ())
    if learns_prompts and "learn" in options_of(strategy, options):
        options["learn"] = "both"
    limits = (request.max_nodes, configured.max_nodes, server.max_nodes)
    return Drafting(strategy, tuple(sorted(options.items())), min(limit for limit in limits if limit is not None))
