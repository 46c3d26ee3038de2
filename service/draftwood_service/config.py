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
from draftwood_strategies.built_in import LOADED_BY

ENV_PREFIX = "DRAFTWOOD_"
CHECK = "--check"
"""The flag that is no setting."""
WITHOUT_MODEL = "without-model"
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


_SERVICE_LINK = re.compile(
    r"(?P<service>[A-Z0-9_]+?)_(?:SERVICE_(?:HOST|PORT(?:_[A-Z0-9_]+)?)|PORT_\d+_(?:TCP|UDP|SCTP)(?:_(?:PROTO|PORT|ADDR))?)"
)
_SERVICE_ADDRESS = re.compile(r"(?:tcp|udp|sctp)://\S+")
"""What Kubernetes adds for each service of a namespace, unless a pod has `enableServiceLinks: false`; of one named
draftwood, DRAFTWOOD_PORT is such an address."""


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
    checked = check_settings(args, environ, prog)
    if isinstance(checked, Settings):
        return checked
    raise checked[0]


def check_settings(
    args: list[str], environ: Mapping[str, str], prog: str = "draftwood serve"
) -> Settings | list[SettingsError]:
    """As `read_settings`, with all that is wrong instead of the first. Raises SystemExit for --help."""
    try:
        merged, sources, unknown = _merged(args, environ, prog)
    except SettingsError as error:
        return [error]
    try:
        settings = Settings(**merged)
    except ValidationError as error:
        return [*unknown, *(_as_error(each, sources) for each in error.errors(include_url=False))]
    return unknown or settings


def service_links(environ: Mapping[str, str]) -> list[str]:
    """The variables that Kubernetes made for services, by their form; they are no settings."""
    return [
        key
        for key, text in environ.items()
        if key.startswith(ENV_PREFIX)
        and (_SERVICE_LINK.fullmatch(key) or (key.endswith("_PORT") and _SERVICE_ADDRESS.fullmatch(text)))
    ]


def as_given(error: InvalidValueError | InvalidSettingError, args: list[str], environ: Mapping[str, str]) -> Exception:
    """The error of a setting that was found wrong later than by `read_settings`, named as it was given."""
    if error.field.partition("[")[0] not in Settings.model_fields:
        return error
    return _as_given(error, _merged(args, environ, "draftwood serve")[1])


def _merged(
    args: list[str], environ: Mapping[str, str], prog: str
) -> tuple[dict[str, Any], dict[str, str], list[SettingsError]]:
    """Values by field, the source of each, and an error for each unknown name.

    Raises:
        SettingsError: a flag has no value, or the file cannot be read.
    """
    flags, unknown = _flags(args, prog)
    others = CLIENT_VARIABLES.union(service_links(environ))
    env = {
        key.removeprefix(ENV_PREFIX).lower(): text
        for key, text in environ.items()
        if key.startswith(ENV_PREFIX) and key not in others and text != ""
    }
    unknown += _without_unknown(
        env, lambda key: ENV_PREFIX + key.upper(), "the environment", [*Settings.model_fields, "config"]
    )
    config = flags.pop("config", None) or env.pop("config", None)
    env.pop("config", None)

    merged: dict[str, Any] = {}
    sources: dict[str, str] = {}
    if config is not None:
        content = _yaml(Path(config))
        unknown += _without_unknown(content, str, config, list(Settings.model_fields))
        for key, value in content.items():
            merged[key], sources[key] = value, config
    for key, text in env.items():
        merged[key], sources[key] = text, ENV_PREFIX + key.upper()
    for key, text in flags.items():
        merged[key], sources[key] = text, flag(key)
    return merged, sources, unknown


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
    result.add_argument(
        CHECK,
        nargs="?",
        const="all",
        choices=("all", WITHOUT_MODEL),
        help="Start nothing: print what would start, or a line for each reason why it would not;"
        f" {WITHOUT_MODEL}: not whether the model is there",
    )
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


def _flags(args: list[str], prog: str) -> tuple[dict[str, str], list[SettingsError]]:
    """Values by field, and an error for the first unknown flag: what follows it may be its value."""
    try:
        parsed, unknown = parser(prog).parse_known_args(args)
    except argparse.ArgumentError as error:
        problem = InvalidInputError("arguments", None, f"{error}; see {prog} --help")
        raise SettingsError(problem, "the command line") from None
    names = [flag(key) for key in [*Settings.model_fields, "config"]]
    errors = [SettingsError(_unknown(name.split("=", 1)[0], names, "flag"), "the command line") for name in unknown[:1]]
    given = {key: value for key, value in vars(parsed).items() if value is not None and flag(key) != CHECK}
    return given, errors


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
    return content


def _without_unknown(values: dict[Any, Any], shown: Any, source: str, known: list[str]) -> list[SettingsError]:
    """Removes what is not known, and returns an error for each."""
    removed = [key for key in values if key not in known]
    for key in removed:
        del values[key]
    names = [shown(name) for name in known]
    return [SettingsError(_unknown(shown(key), names, "setting"), source) for key in removed]


def _unknown(name: str, known: list[str], what: str) -> InvalidInputError:
    prefix = os.path.commonprefix(known)  # noqa: RUF071  it makes any two names alike
    close = difflib.get_close_matches(
        name.removeprefix(prefix), [setting.removeprefix(prefix) for setting in known], n=1
    )
    hint = f"did you mean {prefix}{close[0]}?" if close else "see draftwood serve --help"
    return InvalidInputError(name, None, f"no such {what}; {hint}")


def _as_error(details: Mapping[str, Any], sources: Mapping[str, str]) -> SettingsError:
    """Of one of pydantic's errors."""
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
    # A strategy that has the name of a setting is meant as the strategy.
    mentioned = {*re.findall(r"\w+_\w+", error.allowed)} & Settings.model_fields.keys() - LOADED_BY.keys()
    source = next((sources[name] for name in (key, *sorted(mentioned)) if name in sources), "")
    in_file = bool(source) and not source.startswith(("--", ENV_PREFIX))

    def name(key: str) -> str:
        if in_file:
            return key
        return ENV_PREFIX + key.upper() if source.startswith(ENV_PREFIX) else flag(key)

    allowed = re.sub(r"\w+_\w+", lambda word: name(word[0]) if word[0] in mentioned else word[0], error.allowed)
    shown = type(error)(name(key) + bracket + rest, error.value, allowed)
    return SettingsError(error, source if in_file else sources.get(key, ""), shown)
