"""`draftwood gateway`: from options to a running HTTP server."""

from __future__ import annotations

import re
import signal
import ssl
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import structlog
import typer

from draftwood_client import Client, StatusError
from draftwood_client.cli.apps import new_app, run
from draftwood_client.cli.options import ServerOptions, command
from draftwood_client.errors import ArgumentError, ArgumentValueError
from draftwood_client.target import check_target
from draftwood_errors import InvalidInputError
from draftwood_service.authorization import GATEWAY_HOST
from draftwood_service.starting import MissingExtraError, is_loopback, needs_extra, require_free

if TYPE_CHECKING:
    from draftwood_service.gateway.services import ServiceClient

app = new_app()

_log = structlog.get_logger(__name__)

_KEYLESS = {None: "as the service answers", True: "call with the gateway's own credential", False: "are refused"}
_ASK_SECONDS = 2.0
"""For the service to answer at the start."""


def gateway(args: list[str]) -> int:
    """The command. Returns the exit status."""
    return run(app, args, "gateway", {MissingExtraError: 1})


@app.command()
@command
def _gateway(
    context: typer.Context,
    server: ServerOptions,
    model_servers: Annotated[
        list[str] | None,
        typer.Option(
            "--server",
            metavar="MODEL=HOST:PORT",
            help="Service of one of several models, in the place of --target; repeat it. Requests choose one by"
            " `model`; those without it are for the first.",
        ),
    ] = None,
    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 for all interfaces.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0 for any free port.")] = 8080,
    cors_origin: Annotated[
        list[str] | None,
        typer.Option(help="Origin of web pages that may call, such as https://app.example; repeat it."),
    ] = None,
    allowed_host: Annotated[
        list[str] | None,
        typer.Option(help="Host name by which a proxy passes requests on to a loopback address; repeat it."),
    ] = None,
    max_body_bytes: Annotated[int, typer.Option(min=1024, help="Maximum size of a request in bytes.")] = 4 * 2**20,
    http_tls_cert: Annotated[Path | None, typer.Option(help="PEM certificate chain; makes it HTTPS.")] = None,
    http_tls_key: Annotated[Path | None, typer.Option(help="PEM private key of that certificate.")] = None,
    share_credential: Annotated[
        bool,
        typer.Option(
            "--share-credential", help="Let callers from other machines who have no key call with the gateway's own."
        ),
    ] = False,
    strict: Annotated[
        bool, typer.Option("--strict", help="Refuse requests with unknown fields, rather than leave these out.")
    ] = False,
    drain_grace: Annotated[int, typer.Option(min=1, help="Seconds for streams to end after SIGTERM.")] = 25,
    log_level: Annotated[Literal["debug", "info", "warning", "error"], typer.Option(help="What is logged.")] = "info",
    check: Annotated[
        bool, typer.Option("--check", help="Start nothing, ask no service: print what would start, or why not.")
    ] = False,
) -> None:
    """The API of OpenAI over HTTP, in front of a Draftwood service, or of one for each of several models.

    A request's key (Authorization: Bearer) goes on to the service, which knows its tenant by it. A request without one
    has the gateway's own credential, if it has one: on an address that other machines reach, only with
    --share-credential. Without that a gateway there starts with a client certificate, which its connections may need,
    and refuses requests without a key. A service that asks nobody for a credential, for only its machine reaches it,
    is served on loopback addresses alone.
    """
    source = context.get_parameter_source("target")
    if model_servers and source is not None and source.name == "COMMANDLINE":  # the variable is for other commands
        raise ArgumentValueError("--target", f"{server.target!r} cannot be combined with --server")
    servers = _servers(server, model_servers or [])
    shares = _shares_credential(server, host, share_credential)
    _check_address(host, port)
    if not check:
        for each in servers.values():
            _check_service(each, host)
    tls = _tls(http_tls_cert, http_tls_key)
    # Imported here: --help need not wait for them.
    from draftwood_service.logging_config import configure_logging

    with needs_extra("gateway", "`draftwood gateway`", ("httptools", "prometheus_client", "starlette", "uvicorn")):
        from draftwood_service.gateway.app import Gateway
        from draftwood_service.gateway.connections import run_server
    if check:
        _arguments(server, host)  # reads the files of TLS
        scheme = "http" if tls is None else "https"
        typer.echo(f"address: {scheme}://{host}:{port}")
        for model, each in servers.items():
            typer.echo(f"service{f' of {model}' if model else ''}: {each.target}")
        typer.echo(f"requests without a key: {_KEYLESS[shares]}")
        return
    configure_logging(log_level, "console")
    if shares:
        _log.warning("the gateway has a credential: requests without a key of their own call with it")
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # uvicorn handles it, and raises it again when it has ended
    openers = {model: _opener(each, host) for model, each in servers.items()}
    made = Gateway(openers, max_body_bytes, strict, keyless=shares is not False)
    answering = made.app(cors_origin or [], allowed_host or [] if is_loopback(host) else None)
    run_server(answering, host, port, tls, drain_grace, made.metrics.connection_ended)


def _servers(server: ServerOptions, given: list[str]) -> dict[str, ServerOptions]:
    """How each model's service is reached; "" for the only one. Raises `ArgumentValueError`."""
    if not given:
        return {"": server}
    servers: dict[str, ServerOptions] = {}
    for text in given:
        model, equals, target = text.partition("=")
        if not (equals and re.fullmatch(r"[!-~]{1,200}", model)):
            raise ArgumentValueError("--server", f"{text!r} must look like MODEL=HOST:PORT")
        if model in servers:
            raise ArgumentValueError("--server", f"model {model!r} is given twice")
        try:
            check_target(target)
        except ArgumentError as error:
            raise ArgumentValueError("--server", f"of model {model!r}: {error.args[1]}") from None
        servers[model] = replace(server, target=target)
    return servers


def _shares_credential(server: ServerOptions, host: str, allowed: bool) -> bool | None:
    """Whether callers without a key call with the gateway's own; None if it has none.

    Raises `ArgumentValueError` for a key or token, which are for nothing else, if that is not allowed.
    """
    credentials = {"--api-key": server.api_key, "--token": server.token, "--tls-cert": server.tls_cert}
    given = [flag for flag, value in credentials.items() if value is not None]
    if not given:
        return None
    if allowed or is_loopback(host):
        return True
    if given != ["--tls-cert"]:
        problem = (
            f"{host} is not a loopback address, and whoever reaches it without a key would call with the gateway's own:"
            f" leave out {given[0]} (or its environment variable), or allow it with --share-credential"
        )
        raise ArgumentValueError("--host", problem)
    return False


def _check_address(host: str, port: int) -> None:
    """Ends the command if the gateway cannot listen there."""
    try:
        require_free("port", host, port)
    except InvalidInputError as error:
        typer.echo(f"error: --{error}", err=True)
        raise typer.Exit(1) from None


def _check_service(server: ServerOptions, host: str) -> None:
    """Raises `ArgumentValueError` if the service is for callers of its machine alone, and others reach the gateway.

    One that cannot be asked now refuses each request instead.
    """
    if is_loopback(host):
        return
    try:
        with Client(**_arguments(server, host)) as client:
            client.model_info(timeout=_ASK_SECONDS)
    except StatusError as error:
        if error.reason == "AUTHENTICATION_OFF":
            raise ArgumentValueError("--host", str(error)) from None


def _tls(certificate: Path | None, key: Path | None) -> ssl.SSLContext | None:
    """None for plain HTTP. Raises `ArgumentValueError`."""
    if certificate is None:
        if key is not None:
            raise ArgumentValueError("--http-tls-cert", "must be set, since --http-tls-key is set")
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        context.load_cert_chain(certificate, key)
    except ssl.SSLError as error:
        problem = f"{str(certificate)!r} is no PEM certificate with that private key ({error.reason or error})"
        raise ArgumentValueError("--http-tls-cert", problem) from None
    except OSError as error:
        named = certificate if key is None else f"{certificate}' or '{key}"
        raise ArgumentValueError("--http-tls-cert", f"cannot read '{named}': {error.strerror}") from None
    return context


def _opener(server: ServerOptions, host: str = "127.0.0.1") -> Callable[[Callable[[], str] | None], ServiceClient]:
    from draftwood_service.gateway.services import ServiceClient

    arguments = _arguments(server, host)

    def open_client(credential: Callable[[], str] | None) -> ServiceClient:
        credentials: dict[str, Any] = {} if credential is None else {"api_key": None, "token": credential}
        return ServiceClient(**{**arguments, **credentials})

    return open_client


def _arguments(server: ServerOptions, host: str) -> dict[str, Any]:
    """Of clients of the service. The tenant is that of each request's credential, whatever the environment names for
    the command line. Raises `ArgumentError`."""
    reached = {} if is_loopback(host) else {GATEWAY_HOST: host}
    return {**server.arguments(), "tenant": "", "metadata": reached}
