"""Reads settings from flags, environment and a YAML file, and keeps the source of each value for error messages.

Uses the names of `Settings`' fields, not their meaning.
"""

from __future__ import annotations

import argparse
import difflib
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError
from pydantic.fields import FieldInfo

from draftwood_memory.errors import InvalidSettingError
from draftwood_memory.settings import size_of
from draftwood_model_runner.errors import DraftwoodError, InvalidInputError, InvalidValueError
from draftwood_service.settings import GROUPS, Settings, default_shown

ENV_PREFIX = "DRAFTWOOD_"
CLIENT_VARIABLES = frozenset(
    ENV_PREFIX + name
    for name in (
        *("TARGET", "TENANT", "API_KEY", "TOKEN", "TIMEOUT"),
        *("TLS", "TLS_CA", "TLS_SERVER_NAME", "CLIENT_CERT", "CLIENT_KEY"),
    )
)
"""Those of `draftwood_client.environment`: no settings of the server. To import the client would import gRPC."""
_RANGE_ERRORS = frozenset(
    {"greater_than", "greater_than_equal", "less_than", "less_than_equal", "literal_error", "value_error"}
)
"""pydantic's types of errors for values outside a range or set; the others are values that cannot be parsed."""
_PROBLEMS = {"bool": "must be true or false", "int": "must be an integer", "float": "must be a number"}
"""What is wrong, by the first word of pydantic's type of the error, where its own words are not plain."""


class SettingsError(DraftwoodError):
    """A setting is unknown or wrong; the text is one line, and names settings as they were given.

    Attributes:
        field, allowed: of `error`.
        source: of the value: a flag, an environment variable or a file; "" for a default.
        shown: `error` with other names in its text.
    """

    def __init__(self, error: InvalidValueError, source: str, shown: InvalidValueError | None = None) -> None:
        text = str(shown or error)
        super().__init__(text if source in text else f"{text} (from {source})")
        self.field = error.field
        self.allowed = error.allowed
        self.source = source


def read_settings(args: list[str], environ: Mapping[str, str], prog: str = "draftwood serve") -> Settings:
    """The settings of command-line arguments, environment, and the YAML file that --config or DRAFTWOOD_CONFIG names.

    Raises:
        SettingsError: a setting is unknown or wrong.
        SystemExit: --help was given; help has been printed.
    """
    merged, sources = _merged(args, environ, prog)
    try:
        return Settings(**merged)
    except ValidationError as error:
        raise _first_error(error, sources) from None


def as_given(error: InvalidValueError | InvalidSettingError, args: list[str], environ: Mapping[str, str]) -> Exception:
    """The error of a setting that was found wrong later than by `read_settings`, named as it was given."""
    if error.field.partition("[")[0] not in Settings.model_fields:
        return error
    return _as_given(error, _merged(args, environ, "draftwood serve")[1])


def _merged(args: list[str], environ: Mapping[str, str], prog: str) -> tuple[dict[str, Any], dict[str, str]]:
    """Values by field, and the source of each. Raises SettingsError."""
    flags = _flags(args, prog)
    env = {
        key.removeprefix(ENV_PREFIX).lower(): text
        for key, text in environ.items()
        if key.startswith(ENV_PREFIX) and key not in CLIENT_VARIABLES and text != ""
    }
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
    return merged, sources


def flag(key: str) -> str:
    """The command-line flag of a field."""
    return "--" + key.replace("_", "-")


def parser(prog: str) -> argparse.ArgumentParser:
    """A parser for all fields. Values stay strings, which `Settings` parses and validates."""
    result = argparse.ArgumentParser(
        prog=prog,
        description="Serve a model over gRPC.",
        epilog="A flag takes precedence over its environment variable, and that over the YAML file.",
        allow_abbrev=False,
        exit_on_error=False,
    )
    result.add_argument("--config", metavar="FILE", help="YAML file of settings (env DRAFTWOOD_CONFIG)")
    for group in GROUPS:
        section = result.add_argument_group(group.heading())
        for key, field in group.model_fields.items():
            _add_argument(section, key, field)
    return result


def _add_argument(section: argparse._ArgumentGroup, key: str, field: FieldInfo) -> None:
    text = f"{field.description} (default {default_shown(key)}; env {ENV_PREFIX}{key.upper()})"
    choices = getattr(field.annotation, "__args__", ())
    named = bool(choices) and all(isinstance(choice, str) for choice in choices)
    if named or bool in (field.annotation, *choices):
        metavar = "|".join(choices if named else ("true", "false"))
    else:
        metavar = key.rsplit("_", 1)[-1].upper()
    section.add_argument(flag(key), dest=key, metavar=metavar, help=text.replace("%", "%%"))


def _flags(args: list[str], prog: str) -> dict[str, str]:
    try:
        parsed, unknown = parser(prog).parse_known_args(args)
    except argparse.ArgumentError as error:
        problem = InvalidInputError("arguments", None, f"{error}; see {prog} --help")
        raise SettingsError(problem, "the command line") from None
    if unknown:
        names = [flag(key) for key in [*Settings.model_fields, "config"]]
        name = unknown[0].split("=", 1)[0]
        raise SettingsError(_unknown(name, names, "flag"), "the command line")
    return {key: value for key, value in vars(parsed).items() if value is not None}


def _yaml(path: Path) -> dict[str, Any]:
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise SettingsError(InvalidInputError("config", path, str(error.strerror).lower()), "") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        problem = f"not valid YAML: {' '.join(str(error).split())}"
        raise SettingsError(InvalidInputError("config", path, problem), "") from None
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise SettingsError(InvalidInputError("config", path, "must contain one mapping of settings"), "")
    _refuse_unknown(content, str, str(path), list(Settings.model_fields))
    return content


def _refuse_unknown(values: Mapping[Any, Any], shown: Any, source: str, known: list[str]) -> None:
    for key in values:
        if key not in known:
            raise SettingsError(_unknown(shown(key), [shown(name) for name in known], "setting"), source)


def _unknown(name: str, known: list[str], what: str) -> InvalidInputError:
    prefix = os.path.commonprefix(known)  # noqa: RUF071  it makes any two names alike
    close = difflib.get_close_matches(
        name.removeprefix(prefix), [setting.removeprefix(prefix) for setting in known], n=1
    )
    hint = f"did you mean {prefix}{close[0]}?" if close else "see draftwood serve --help"
    return InvalidInputError(name, None, f"no such {what}; {hint}")


def _first_error(error: ValidationError, sources: Mapping[str, str]) -> SettingsError:
    details = error.errors(include_url=False)[0]
    cause = details.get("ctx", {}).get("error")
    if isinstance(cause, InvalidValueError | InvalidSettingError):
        return _as_given(cause, sources)
    key, value = str(details["loc"][0]), details["input"]
    if details["type"] in _RANGE_ERRORS:
        allowed = str(cause) if cause else details["msg"].replace("Input should be", "it must be", 1)
        return _as_given(InvalidValueError(key, value, allowed), sources)
    field = Settings.model_fields[key]
    if details["type"] == "int_parsing" and size_of in [getattr(rule, "func", None) for rule in field.metadata]:
        return _as_given(
            InvalidInputError(key, value, "must be a number of bytes, or one with the suffix K, M or G"), sources
        )
    theirs = details["msg"].replace("Input should be", "must be", 1).partition(",")[0]
    return _as_given(InvalidInputError(key, value, _PROBLEMS.get(details["type"].partition("_")[0], theirs)), sources)


def _as_given(error: InvalidValueError | InvalidSettingError, sources: Mapping[str, str]) -> SettingsError:
    """Names settings as flags, as environment variables, or as keys of the file: as the wrong one was given. One that
    is missing is named as one that the error mentions."""
    if isinstance(error, InvalidSettingError):
        error = InvalidInputError(error.field, error.value, error.problem)
    key, bracket, rest = error.field.partition("[")
    mentioned = {name for name in re.findall(r"\w+_\w+", error.allowed) if name in Settings.model_fields}
    source = next((sources[name] for name in (key, *sorted(mentioned)) if name in sources), "")
    in_file = bool(source) and not source.startswith(("--", ENV_PREFIX))

    def name(key: str) -> str:
        if in_file:
            return key
        return ENV_PREFIX + key.upper() if source.startswith(ENV_PREFIX) else flag(key)

    allowed = re.sub(r"\w+_\w+", lambda word: name(word[0]) if word[0] in mentioned else word[0], error.allowed)
    shown = type(error)(name(key) + bracket + rest, error.value, allowed)
    return SettingsError(error, source if in_file else sources.get(key, ""), shown)
