"""The arms of an experiment on the command line: `--arm long=trie,branch_length=8 --weight long=2 --fork long`."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from draftwood_client.cli.admin.fields import Data
from draftwood_client.errors import ArgumentValueError

_FORM = "must be NAME=STRATEGY[,OPTION=VALUE]...; max_nodes is the draft limit"


def arms_of(arms: Iterable[str], weights: Iterable[str], forks: Iterable[str]) -> list[Data]:
    """The arms, the control first. Raises ArgumentValueError."""
    found: dict[str, Data] = {}
    for text in arms:
        name, arm = _arm(text)
        if name in found:
            raise ArgumentValueError("--arm", f"two arms are named {name}")
        found[name] = arm
    for text in weights:
        name, _, number = text.partition("=")
        try:
            _named(found, name, "--weight")["weight"] = float(number)
        except ValueError as error:
            if isinstance(error, ArgumentValueError):
                raise
            raise ArgumentValueError("--weight", f"{text!r} must be NAME=NUMBER") from None
    for name in forks:
        _named(found, name, "--fork")["memory"] = "ARM_MEMORY_FORKED"
    return [*found.values()]


def _arm(text: str) -> tuple[str, Data]:
    name, equals, rest = text.partition("=")
    strategy, *settings = rest.split(",")
    options: dict[str, Any] = {}
    for setting in settings:
        option, sign, value = setting.partition("=")
        if not (option and sign) or option in options:
            raise ArgumentValueError("--arm", f"{text!r} {_FORM}, each option once")
        options[option] = _value(value)
    if not (name and equals):
        raise ArgumentValueError("--arm", f"{text!r} {_FORM}")
    drafting: Data = {"strategy": strategy} if strategy else {}
    if "max_nodes" in options:
        drafting["maxNodes"] = options.pop("max_nodes")
    if options:
        drafting["options"] = options
    return name, {"id": name, "drafting": drafting} if drafting else {"id": name}


def _named(arms: dict[str, Data], name: str, option: str) -> Data:
    if name not in arms:
        raise ArgumentValueError(option, f"there is no arm {name!r}; there are: {', '.join(arms) or 'none'}")
    return arms[name]


def _value(text: str) -> Any:
    """A number, true or false, as in JSON; anything else is text."""
    try:
        return json.loads(text)
    except ValueError:
        return text
