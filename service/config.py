"""Where settings come from: flags, environment and YAML file, merged, with the source of each value remembered.

Knows the names of `Settings`' fields and nothing of what they mean.
"""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NoReturn

import yaml
from pydantic import ValidationError

from model_runner.errors import InvalidValueError
from service.settings import Settings, default_shown

ENV_PREFIX = "DRAFTWOOD_"
CLIENT_VARIABLES = frozenset({"DRAFTWOOD_TARGET", "DRAFTWOOD_TENANT", "DRAFTWOOD_TOKEN"})
"""Variables of the client's commands, which may stand in the same environment."""


class SettingsError(InvalidValueError):
    """A setting is unknown or has a value that is not allowed; the text is one line.

    Attributes:
        source: what it came from: a flag, an environment variable or a file.
    """

    def __init__(self, key: str, value: object, allowed: str, source: str) -> None:
        super().__init__(key, value, allowed)
        self.source = source

    def __str__(self) -> str:
        return f"{super().__str__()} (from {self.source})" if self.source else super().__str__()


def read_settings(args: list[str], environ: Mapping[str, str], prog: str = "draftwood serve") -> Settings:
    """The settings of command-line arguments, environment and the YAML file that one of both names.

    Raises:
        SettingsError: a key is unknown or a value is not allowed, wherever it comes from.
        SystemExit: the arguments ask for help, which has been printed.
    """
    flags = _flags(args, prog)
    env = {key[len(ENV_PREFIX) :].lower(): text for key, text in _own(environ).items() if text != ""}
    _refuse_unknown(env, lambda key: ENV_PREFIX + key.upper(), "the environment", [*Settings.model_fields, "config"])
    config = flags.pop("config", None) or env.pop("config", None)
    env.pop("config", None)

    merged: dict[str, Any] = {}
    sources: dict[str, str] = {}
    if config is not None:
        for key, value in _yaml(Path(config)).items():
            merged[key], sources[key] = value, config
    for key, text in env.items():
        merged[key], sources[key] = text, ENV_PREFIX + key.upper()
    for key, text in flags.items():
        merged[key], sources[key] = text, flag(key)
    try:
        return Settings(**merged)
    except ValidationError as error:
        raise _first_error(error, sources) from None


def flag(key: str) -> str:
    """The command-line flag of a field."""
    return "--" + key.replace("_", "-")


def parser(prog: str) -> argparse.ArgumentParser:
    """A parser for all fields; every value is a string, for `Settings` alone knows what is allowed."""
    result = _Parser(
        prog=prog,
        description="Serves a model through gRPC.",
        epilog="A flag wins over its environment variable, and that over the YAML file.",
        allow_abbrev=False,
    )
    result.add_argument("--config", metavar="FILE", help="YAML file of settings (env DRAFTWOOD_CONFIG)")
    for key, field in Settings.model_fields.items():
        text = f"{field.description} (default {default_shown(key)}; env {ENV_PREFIX}{key.upper()})"
        choices = getattr(field.annotation, "__args__", ())
        named = bool(choices) and all(isinstance(choice, str) for choice in choices)
        metavar = "|".join(choices) if named else key.rsplit("_", 1)[-1].upper()
        result.add_argument(flag(key), dest=key, metavar=metavar, help=text.replace("%", "%%"))
    return result


class _Parser(argparse.ArgumentParser):
    """Raises what argparse would print and exit with."""

    def error(self, message: str) -> NoReturn:
        raise SettingsError("arguments", message, f"see {self.prog} --help", "the command line")


def _flags(args: list[str], prog: str) -> dict[str, str]:
    parsed, unknown = parser(prog).parse_known_args(args)
    if unknown:
        names = [flag(key) for key in [*Settings.model_fields, "config"]]
        name = unknown[0].split("=", 1)[0]
        raise SettingsError(name, unknown[0], _unknown(name, names, "flag"), "the command line")
    return {key: value for key, value in vars(parsed).items() if value is not None}


def _own(environ: Mapping[str, str]) -> dict[str, str]:
    return {key: value for key, value in environ.items() if key.startswith(ENV_PREFIX) and key not in CLIENT_VARIABLES}


def _yaml(path: Path) -> dict[str, Any]:
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        allowed = f"it must be a file that can be read: {error.strerror}"
        raise SettingsError("config", str(path), allowed, "") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        allowed = f"it must be YAML: {' '.join(str(error).split())}"
        raise SettingsError("config", str(path), allowed, "") from None
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise SettingsError("config", str(path), "it must hold one mapping of settings", "")
    _refuse_unknown(content, str, str(path), list(Settings.model_fields))
    return content


def _refuse_unknown(values: Mapping[Any, Any], shown: Any, source: str, known: list[str]) -> None:
    for key, value in values.items():
        if key not in known:
            names = [shown(name) for name in known]
            raise SettingsError(shown(key), value, _unknown(shown(key), names, "setting"), source)


def _unknown(name: str, known: Iterable[str], what: str) -> str:
    close = difflib.get_close_matches(name, known, n=1)
    return f"there is no such {what}" + (f"; did you mean {close[0]}?" if close else f"; known: {', '.join(known)}")


def _first_error(error: ValidationError, sources: Mapping[str, str]) -> SettingsError:
    details = error.errors(include_url=False)[0]
    cause = details.get("ctx", {}).get("error")
    if isinstance(cause, InvalidValueError):
        return SettingsError(cause.field, cause.value, cause.allowed, sources.get(cause.field, ""))
    key = str(details["loc"][0])
    allowed = str(cause) if cause else details["msg"].replace("Input should be", "it must be", 1)
    return SettingsError(key, details["input"], allowed, sources.get(key, ""))
