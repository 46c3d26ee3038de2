"""The options of a strategy, read off the signature of its factory: names, types, and what is allowed.

A factory declares what its annotations say: `branch_length: Annotated[int, Range(1, 256)] = 32`, `learn:
Literal["outputs", "prompts"] = "outputs"`. One without `Range` takes every value of the type.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from inspect import Parameter, signature
from types import MappingProxyType
from typing import Annotated, Any, Literal, TypeAlias, get_args, get_origin

OptionValue: TypeAlias = bool | int | float | str
Options: TypeAlias = tuple[tuple[str, OptionValue], ...]
"""(name, value) pairs in the order of their names: hashable, so that equal ones share a strategy's instance."""
_NAMES = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}


@dataclass(frozen=True, slots=True)
class Range:
    """Allowed numbers.

    Attributes:
        minimum, maximum: the bounds; None for none.
        open: the bounds themselves are not allowed.
    """

    minimum: float | None = None
    maximum: float | None = None
    open: bool = False

    def __contains__(self, value: float) -> bool:
        low = -math.inf if self.minimum is None else self.minimum
        high = math.inf if self.maximum is None else self.maximum
        return low < value < high if self.open else low <= value <= high

    def __str__(self) -> str:
        if self.maximum is None:
            return f"be {'above' if self.open else 'at least'} {self.minimum}"
        if self.minimum is None:
            return f"be {'below' if self.open else 'at most'} {self.maximum}"
        left, right = "()" if self.open else "[]"
        return f"lie in {left}{self.minimum}, {self.maximum}{right}"


@dataclass(frozen=True, slots=True)
class Option:
    """An option of a strategy.

    Attributes:
        kind: bool, int, float or str; None for anything.
        default: None if it must be given.
        allowed: of a number.
        choices: of a text; empty for any.
    """

    name: str
    kind: type | None
    default: object
    allowed: Range | None = None
    choices: tuple[str, ...] = ()

    def checked(self, value: OptionValue) -> OptionValue:
        """The value in the option's type: a whole float, which JSON has for every number, becomes an int.

        Raises:
            ValueError: it is not allowed; the text begins with the option's name and says what is.
        """
        if self.kind is int and isinstance(value, float) and value.is_integer():
            value = int(value)
        elif self.kind is float and isinstance(value, int) and not isinstance(value, bool):
            value = float(value)
        if self.kind is not None and type(value) is not self.kind:
            raise ValueError(f"{self.name}: {_shown(value)} is not allowed; it must be {_NAMES[self.kind]}")
        if isinstance(value, float) and not math.isfinite(value):
            raise ValueError(f"{self.name}: {value} is not allowed; it must be a number")
        if self.allowed is not None and isinstance(value, int | float) and value not in self.allowed:
            raise ValueError(f"{self.name}: {value} is not allowed; it must {self.allowed}")
        if self.choices and value not in self.choices:
            raise ValueError(f"{self.name}: {_shown(value)} is unknown; the values are {', '.join(self.choices)}")
        return value


@cache
def read_options(factory: Callable[..., object]) -> Mapping[str, Option]:
    """The options that a factory declares, by name; without those of a `**` parameter."""
    try:
        parameters = signature(factory, eval_str=True).parameters.values()
    except Exception:  # annotations that cannot be evaluated say nothing
        parameters = signature(factory).parameters.values()
    kinds = (Parameter.KEYWORD_ONLY, Parameter.POSITIONAL_OR_KEYWORD)
    return MappingProxyType({parameter.name: _option(parameter) for parameter in parameters if parameter.kind in kinds})


def check(options: Mapping[str, Option], values: Mapping[str, OptionValue]) -> dict[str, OptionValue]:
    """The values in the types of their options.

    Raises:
        ValueError: an option is unknown, or its value not allowed; the text begins with its name.
    """
    for name in values:
        if name not in options:
            raise ValueError(f"{name}: there is no such option; there are: {', '.join(sorted(options)) or 'none'}")
    return {name: options[name].checked(value) for name, value in values.items()}


def _option(parameter: Parameter) -> Option:
    kind: Any = parameter.annotation
    default = None if parameter.default is Parameter.empty else parameter.default
    allowed = None
    if get_origin(kind) is Annotated:
        kind, *notes = get_args(kind)
        allowed = next((note for note in notes if isinstance(note, Range)), None)
    if get_origin(kind) is Literal:
        return Option(parameter.name, str, default, choices=get_args(kind))
    return Option(parameter.name, kind if kind in _NAMES else None, default, allowed)


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
