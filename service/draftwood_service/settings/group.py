"""What all groups of settings have in common: their base, and types of values that a text stands for."""

from __future__ import annotations

import json
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from draftwood_memory.settings.memory_settings import definition_of, size_of
from draftwood_model_runner.errors import InvalidInputError

T = TypeVar("T")


class SettingsGroup(BaseModel):
    """Settings of one purpose. `Settings` inherits from all groups, so that each setting has one flat, public name.

    What needs one group alone takes that as its argument. The first line of a group's docstring is its heading in help,
    and the text below a field is the field's.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=(), use_attribute_docstrings=True)

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: Any) -> None:
        for field in cls.model_fields.values():
            field.description = " ".join(str(field.description).split())

    @classmethod
    def heading(cls) -> str:
        """For help and documentation."""
        return str(cls.__doc__).splitlines()[0].rstrip(".")

    def require_both(self, *keys: str) -> None:
        """Raises InvalidInputError if one of two settings is set and the other is not."""
        for missing, present in (keys, reversed(keys)):
            if getattr(self, missing) is None and getattr(self, present) is not None:
                raise InvalidInputError(missing, None, f"must be set, since {present} is set")


def shared(name: str) -> Any:
    """A setting that plug-ins of other engines have as well, defined in `draftwood_memory.settings`."""
    return Field(**definition_of(name))


def _items(given: object) -> object:
    return [part.strip() for part in given.split(",") if part.strip()] if isinstance(given, str) else given


def _weights(given: object) -> object:
    if not isinstance(given, str):
        return given
    pairs = [part.rpartition("=") for part in given.split(",") if part.strip()]
    if not all(name.strip() and weight.strip() for name, _, weight in pairs):
        raise InvalidInputError("tenant_weights", given, "must look like acme=2,beta=0.5")
    return {name.strip(): weight for name, _, weight in pairs}


def _json_object(given: object) -> object:
    if not isinstance(given, str):
        return given
    try:
        found = json.loads(given)
    except ValueError as error:
        raise InvalidInputError("engine_args", given, f"must be a JSON object: {error}") from None
    if not isinstance(found, dict):
        raise InvalidInputError("engine_args", given, "must be a JSON object")
    return found


Size = Annotated[int, BeforeValidator(size_of)]
"""A number of bytes, or of KiB, MiB or GiB with the suffix K, M or G."""
OptionalSize = Annotated[int | None, BeforeValidator(size_of)]
Items = Annotated[tuple[T, ...], BeforeValidator(_items)]
"""From a flag or the environment, "RS256,ES256"; a list from YAML."""
Weights = Annotated[dict[str, float], BeforeValidator(_weights)]
"""From a flag or the environment, "acme=2,beta=0.5"; a mapping from YAML."""
JsonObject = Annotated[dict[str, Any], BeforeValidator(_json_object)]
"""From a flag or the environment, JSON; a mapping from YAML."""
