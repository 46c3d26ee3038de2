"""A request's drafting options: as it carries them in any engine, and as they are resolved."""

from __future__ import annotations

import unicodedata
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from draftwood_errors import InvalidInputError, InvalidValueError
from draftwood_memory.config import MemoryOverrides
from draftwood_memory.memory import StrategyUse
from draftwood_memory.resident import StrategyKey
from draftwood_memory.store.naming import TENANT_ID, TENANT_ID_ALLOWED, MemoryName
from draftwood_strategies.drafting import NO_CHOICE, UNDRAFTED, DraftChoice, Drafting

TENANT, SESSION, STRATEGY, MAX_NODES, LEARN, SWITCH = (
    "draftwood_tenant",
    "draftwood_session",
    "draftwood_strategy",
    "draftwood_max_nodes",
    "draftwood_learn",
    "draftwood",
)
TRUSTED = "draftwood_request"
"""What Draftwood's service has decided for a request of an engine that it runs: see `trusted_options`."""
_MAX_BYTES = 256
"""As the server allows."""
_WORDS = {"on": True, "true": True, "1": True, "off": False, "false": False, "0": False}


@dataclass(frozen=True, slots=True)
class RequestChoice:
    """What a request says.

    Attributes:
        tenant: "" for none.
        session: key of the conversation, for experiments; "" for none.
        learns: its answer may be learned.
    """

    tenant: str
    session: str = ""
    drafting: DraftChoice = NO_CHOICE
    learns: bool = True


@dataclass(frozen=True, slots=True)
class RequestOptions:
    """How one request is drafted for, and what becomes of its answer.

    Attributes:
        tenant: the memory that it drafts from and adds to; "" for none: its own prompt and output alone.
        learns: its answer is added to the memory.
        arm: of an experiment, which has a memory of its own; "" outside of one.
        overrides: what the memory may be and keep.
        with_prompt: its answer is kept together with its prompt.
        key: of the request; nothing is learned of one with the key of a recent one. "" for none.
        sample: which one of the answers to this request.
    """

    tenant: str = ""
    drafting: Drafting = UNDRAFTED
    learns: bool = False
    arm: str = ""
    overrides: MemoryOverrides = MemoryOverrides()
    with_prompt: bool = False
    key: str = ""
    sample: int = 0

    @property
    def use(self) -> StrategyUse:
        """Memory and strategy of a request with a tenant."""
        key = StrategyKey(self.drafting.strategy, self.drafting.options)
        return StrategyUse(MemoryName(self.tenant, self.arm), key, self.overrides)


def read_choice(given: Mapping[str, Any] | None, tenant: str) -> RequestChoice:
    """What a request says.

    Args:
        given: what it carries, other keys among it.
        tenant: of a request that names none.

    Raises:
        InvalidValueError: a value is not allowed; its field is the key.
    """
    given = given or {}
    return RequestChoice(
        tenant=_tenant(given.get(TENANT, tenant)),
        session=_session(given.get(SESSION, "")),
        drafting=DraftChoice(
            strategy=str(given[STRATEGY]) if STRATEGY in given else None,
            max_nodes=_nodes(given[MAX_NODES]) if MAX_NODES in given else None,
            enabled=_switch(SWITCH, given.get(SWITCH, True)),
        ),
        learns=_switch(LEARN, given.get(LEARN, True)),
    )


def trusted_options(given: Mapping[str, Any] | None) -> RequestOptions:
    """The options of a request of an engine that Draftwood's service runs: those under `TRUSTED`, and no other key.

    A request without them is not drafted for and not learned.
    """
    decided = (given or {}).get(TRUSTED)
    if not isinstance(decided, Mapping):
        return RequestOptions()
    values = dict(decided)
    values["overrides"] = MemoryOverrides(**values["overrides"])
    strategy, options, max_nodes = values["drafting"]
    values["drafting"] = Drafting(strategy, tuple((str(name), value) for name, value in options), max_nodes)
    return RequestOptions(**values)


def _switch(key: str, value: Any) -> bool:
    """vLLM's API makes numbers of JSON's true and false."""
    switched = _WORDS.get(str(value).lower())
    if switched is None:
        raise InvalidValueError(key, value, "it must be on or off, true or false, 1 or 0")
    return switched


def _tenant(value: Any) -> str:
    """ "" is none."""
    if not isinstance(value, str) or not (value == "" or TENANT_ID.fullmatch(value)):
        raise InvalidInputError(TENANT, None, f"must be empty, or {TENANT_ID_ALLOWED}")
    return value


def _session(value: Any) -> str:
    fits = isinstance(value, str) and len(value.encode("utf-8", "surrogatepass")) <= _MAX_BYTES
    if not fits or any(unicodedata.category(character) == "Cc" for character in value):
        problem = f"must be text of at most {_MAX_BYTES} bytes of UTF-8 without control characters"
        raise InvalidInputError(SESSION, None, problem)
    return str(value)


def _nodes(value: Any) -> int:
    try:
        return int(value)
    except (TypeError, ValueError):
        raise InvalidValueError(MAX_NODES, value, "it must be a whole number of at least 0") from None
