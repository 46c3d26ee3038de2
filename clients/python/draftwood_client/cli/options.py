"""Groups of options that several commands share, and the decorator that turns functions with groups into commands."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Annotated, Any, cast, get_type_hints

import typer

from draftwood_client import environment
from draftwood_client.admin import AdminClient
from draftwood_client.client import Client
from draftwood_client.connection import DEFAULT_TIMEOUT
from draftwood_client.errors import (
    ArgumentError,
    ArgumentValueError,
    DraftwoodError,
    StatusError,
    UnauthenticatedError,
)
from draftwood_client.memory import MemoryClient
from draftwood_client.options import UNSET, GenerateOptions, TlsConfig
from draftwood_client.target import DEFAULT_TARGET

USAGE_ERROR = 2
FAILURE = 1
INTERRUPTED = 130


_FLAGS = {
    "n": "--samples",
    "tls.root_certificates": "--tls-ca",
    "tls.certificate_chain": "--tls-cert",
    "tls.private_key": "--tls-key",
}
"""By the client's name of an argument, where it is another one."""


def _flag(argument: str) -> str:
    return _FLAGS.get(argument) or "--" + argument.replace("_", "-")


def _option(panel: str, help: str, *names: str, **settings: Any) -> Any:
    return typer.Option(*names, help=help, rich_help_panel=panel, **{"show_default": False, **settings})


def _connection(help: str, *names: str, **settings: Any) -> Any:
    return _option("Connection", help, *names, **settings)


@dataclass(frozen=True, slots=True)
class CredentialOptions:
    """How to connect to servers, and as whom."""

    api_key: Annotated[
        str | None, _connection("API key; the variable keeps it out of process lists.", envvar=environment.API_KEY)
    ] = None
    token: Annotated[
        str | None, _connection("Token (JWT) instead of an API key; better in the variable.", envvar=environment.TOKEN)
    ] = None
    plaintext_credentials: Annotated[
        bool, _connection("Send them to another machine without TLS.", "--plaintext-credentials")
    ] = False
    tls: Annotated[bool, _connection("Use TLS; trust public authorities.", "--tls", envvar=environment.TLS)] = False
    tls_ca: Annotated[
        Path | None, _connection("Use TLS; trust the authorities in this PEM file.", envvar=environment.TLS_CA)
    ] = None
    tls_cert: Annotated[
        Path | None, _connection("Client certificate, PEM; requires --tls-key.", envvar=environment.CLIENT_CERT)
    ] = None
    tls_key: Annotated[Path | None, _connection("Private key of --tls-cert, PEM.", envvar=environment.CLIENT_KEY)] = (
        None
    )
    tls_server_name: Annotated[
        str | None,
        _connection(
            "Name on the server's certificate, if it differs from --target.", envvar=environment.TLS_SERVER_NAME
        ),
    ] = None

    def _credentials(self) -> dict[str, Any]:
        return {
            "api_key": self.api_key,
            "token": self.token,
            "plaintext_credentials": self.plaintext_credentials,
            "tls": self._tls(),
        }

    def _tls(self) -> bool | TlsConfig:
        for missing, given in (("tls_key", "tls_cert"), ("tls_cert", "tls_key")):
            if getattr(self, missing) is None and getattr(self, given) is not None:
                raise ArgumentValueError(_flag(missing), f"must be set, since {_flag(given)} is set")
        files = (self.tls_ca, self.tls_cert, self.tls_key)
        use_tls = self.tls or self.tls_server_name is not None or any(files)
        return TlsConfig.from_files(*files, server_name=self.tls_server_name) if use_tls else False


@dataclass(frozen=True, slots=True)
class ServerOptions(CredentialOptions):
    """With the address of one server, and the time that it has."""

    target: Annotated[str, _connection("Server as host:port.", envvar=environment.TARGET, show_default=True)] = (
        DEFAULT_TARGET
    )
    timeout: Annotated[
        float | None,
        _connection(
            f"Deadline of a request in seconds, {DEFAULT_TIMEOUT:g} by default; inf for none.",
            envvar=environment.TIMEOUT,
        ),
    ] = None

    def admin_client(self) -> AdminClient:
        """Raises `ArgumentError`."""
        return AdminClient(**self.arguments())

    def arguments(self) -> dict[str, Any]:
        """Of the clients. Raises `ArgumentError`."""
        return {
            **self._credentials(),
            "target": self.target,
            "timeout": UNSET if self.timeout is None else self.timeout,
        }


@dataclass(frozen=True, slots=True)
class ReplicaOptions(CredentialOptions):
    """With the addresses of several servers."""

    target: Annotated[
        list[str] | None,
        _connection("Server as host:port, 127.0.0.1:50051 by default. May be repeated.", envvar=environment.TARGET),
    ] = None

    def targets(self) -> list[str]:
        """The addresses, each once, in their order."""
        return list(dict.fromkeys(self.target or [DEFAULT_TARGET]))

    def admin_client(self, target: str) -> AdminClient:
        """Raises `ArgumentError`."""
        return AdminClient(target, **self._credentials())


@dataclass(frozen=True, slots=True)
class ConnectionOptions(ServerOptions):
    """With the tenant of requests."""

    tenant: Annotated[str | None, _connection("Tenant; its memory drafts and learns.", envvar=environment.TENANT)] = (
        None
    )

    def client(self) -> Client:
        """Raises `ArgumentError`."""
        return Client(**self.arguments())

    def memory_client(self) -> MemoryClient:
        """Raises `ArgumentError`."""
        return MemoryClient(**self.arguments())

    def arguments(self) -> dict[str, Any]:
        if self.tenant == "":
            raise ArgumentValueError("--tenant", "must not be empty; leave it out for the tenant of the credential")
        return {**ServerOptions.arguments(self), "tenant": self.tenant}


def _sampling(help: str, *names: str) -> Any:
    return _option("Sampling", help, *names)


def _stopping(help: str, *names: str) -> Any:
    return _option("Stopping", help, *names)


def _drafting(help: str, *names: str) -> Any:
    return _option("Drafting (never changes the answer)", help, *names)


@dataclass(frozen=True, slots=True)
class GenerationFlags:
    """Options of a request; the fields are those of `GenerateOptions`."""

    temperature: Annotated[
        float | None, _sampling("Temperature; 0, the default, is greedy decoding, as is all below 1e-5.")
    ] = None
    top_k: Annotated[int | None, _sampling("Sample from the k most probable tokens.")] = None
    top_p: Annotated[
        float | None, _sampling("Sample from the most probable tokens that add up to this probability.")
    ] = None
    min_p: Annotated[float | None, _sampling("Sample from tokens at least this probable, relative to the best.")] = None
    repetition_penalty: Annotated[
        float | None, _sampling("Above 1, tokens of prompt and answer become less likely.")
    ] = None
    presence_penalty: Annotated[
        float | None, _sampling("Subtracted from the logit of a token that the answer contains.")
    ] = None
    frequency_penalty: Annotated[
        float | None, _sampling("Subtracted once for each time that the answer contains the token.")
    ] = None
    seed: Annotated[int | None, _sampling("Seed; the same seed gives the same answer.")] = None
    n: Annotated[int | None, _sampling("Number of answers.", "--samples")] = None
    top_logprobs: Annotated[
        int | None, _sampling("With --json: log-probabilities of tokens and of this many alternatives.")
    ] = None
    json_schema: Annotated[str | None, _sampling("Answer with JSON of this JSON schema; @FILE reads it.")] = None
    regex: Annotated[str | None, _sampling("Answer with text that matches this regular expression.")] = None
    lark: Annotated[str | None, _sampling("Answer with text of this grammar, in Lark's syntax; @FILE reads it.")] = None
    max_tokens: Annotated[int | None, _stopping("New tokens, at most.", "--max-tokens", "-n")] = None
    min_tokens: Annotated[int | None, _stopping("New tokens, at least.")] = None
    stop: Annotated[list[str] | None, _stopping("Stop before this text. May be repeated.")] = None
    stop_token_ids: Annotated[
        list[int] | None, _stopping("Stop at this token. May be repeated.", "--stop-token-id")
    ] = None
    ignore_eos: Annotated[bool | None, _stopping("Do not stop at end-of-sequence tokens.", "--ignore-eos")] = None
    model: Annotated[str | None, _option("Queueing", "The model, which must be the served one.")] = None
    session: Annotated[
        str | None, _option("Queueing", "Key of the conversation: experiments give its requests the same arm.")
    ] = None
    priority: Annotated[int | None, _option("Queueing", "Among the tenant's requests, -10 to 10, higher first.")] = None
    drafting: Annotated[bool | None, _drafting("Switch drafting on or off.", "--drafting/--no-drafting")] = None
    learn: Annotated[bool | None, _drafting("Learn from this request.", "--learn/--no-learn")] = None
    strategy: Annotated[str | None, _drafting("Drafting strategy, one of those that `draftwood info` lists.")] = None
    max_draft_nodes: Annotated[int | None, _drafting("Draft tokens per step, at most.")] = None

    def options(self) -> GenerateOptions:
        """Raises `ArgumentError`."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        for name in ("json_schema", "lark"):
            if values[name] is not None:
                values[name] = or_content(f"--{name.replace('_', '-')}", values[name])
        return cast(GenerateOptions, {name: value for name, value in values.items() if value is not None})


def or_content(flag: str, given: str) -> str:
    """A value as it is given, or the content of the file of "@FILE". Raises `ArgumentValueError`."""
    if not given.startswith("@"):
        return given
    try:
        return Path(given[1:]).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        problem = getattr(error, "strerror", None) or "it is not UTF-8 text"
        raise ArgumentValueError(flag, f"{given[1:]!r} cannot be read: {problem}") from None


def command(function: Callable[..., None]) -> Callable[..., None]:
    """Makes a function with option groups a typer command: a parameter of a dataclass type stands for the fields of the
    dataclass. Errors of the client become one line on stderr and an exit status.
    """
    hints = get_type_hints(function, include_extras=True)
    groups: dict[str, Any] = {name: hint for name, hint in hints.items() if is_dataclass(hint)}
    parameters: list[inspect.Parameter] = []
    for name, parameter in inspect.signature(function).parameters.items():
        if name in groups:
            parameters += _group_parameters(groups[name])
        else:
            parameters.append(parameter.replace(annotation=hints[name], kind=inspect.Parameter.KEYWORD_ONLY))

    def run(**values: Any) -> None:
        for name, group in groups.items():
            values[name] = group(**{field.name: values.pop(field.name) for field in fields(group)})
        with one_line_errors(), _named_flags({field.name for group in groups.values() for field in fields(group)}):
            function(**values)

    run.__name__ = function.__name__
    run.__doc__ = function.__doc__
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return run


@contextmanager
def _named_flags(options: set[str]) -> Iterator[None]:
    """Errors of arguments that options stand for name the option."""
    try:
        yield
    except ArgumentError as error:
        if error.argument in options or error.argument in _FLAGS:
            raise type(error)(_flag(error.argument), error.args[1]) from error
        raise


def _group_parameters(group: Any) -> list[inspect.Parameter]:
    hints = get_type_hints(group, include_extras=True)
    return [
        inspect.Parameter(
            field.name, inspect.Parameter.KEYWORD_ONLY, default=field.default, annotation=hints[field.name]
        )
        for field in fields(group)
    ]


@contextmanager
def one_line_errors() -> Iterator[None]:
    """Exit status 2 for an invalid argument, 1 for any other error of the client, 130 for Ctrl-C."""
    try:
        yield
    except ArgumentError as error:
        print_error(error)
        raise typer.Exit(USAGE_ERROR) from error
    except DraftwoodError as error:
        print_error(error)
        raise typer.Exit(FAILURE) from error
    except KeyboardInterrupt:
        raise typer.Exit(INTERRUPTED) from None
    except typer.Abort as abort:  # a question to confirm was left
        if isinstance(abort.__context__, KeyboardInterrupt):
            raise typer.Exit(INTERRUPTED) from None
        raise


def print_error(error: DraftwoodError) -> None:
    """One line on stderr, with the problems of all fields that the server reported."""
    typer.echo(f"error: {error_line(error)}", err=True)


def error_line(error: DraftwoodError) -> str:
    """The error's text with the problems of all fields that the server reported, without line ends."""
    text = str(error)
    if isinstance(error, StatusError):
        unnamed = [violation for violation in error.violations if violation.description not in text]
        text = "; ".join([text, *(f"{violation.field}: {violation.description}" for violation in unnamed)])
    if isinstance(error, UnauthenticatedError):
        text += f"; a key is given by --api-key or {environment.API_KEY}, a token by --token or {environment.TOKEN}"
    return " ".join(text.split())
