"""`draftwood gateway`: from options to a running HTTP server."""

from __future__ import annotations

import signal
import ssl
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import structlog
import typer

from draftwood_client import AsyncClient
from draftwood_client.cli.apps import new_app, run
from draftwood_client.cli.options import ServerOptions, command
from draftwood_service.starting.extras import MissingExtraError, needs_extra

app = new_app()

_log = structlog.get_logger(__name__)


def gateway(args: list[str]) -> int:
    """The command. Returns the exit status."""
    return run(app, args, "gateway")


@app.command()
@command
def _gateway(
    server: ServerOptions,
    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 for all interfaces.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0 for any free port.")] = 8080,
    page: Annotated[bool, typer.Option("--page/--no-page", help="Serve a page to try it at /.")] = True,
    cors_origin: Annotated[
        list[str] | None,
        typer.Option(help="Origin of web pages that may call, such as https://app.example; repeat it."),
    ] = None,
    max_body_bytes: Annotated[int, typer.Option(min=1024, help="Maximum size of a request in bytes.")] = 4 * 2**20,
    http_tls_cert: Annotated[Path | None, typer.Option(help="PEM certificate chain; makes it HTTPS.")] = None,
    http_tls_key: Annotated[Path | None, typer.Option(help="PEM private key of that certificate.")] = None,
    drain_grace: Annotated[int, typer.Option(min=1, help="Seconds for streams to end after SIGTERM.")] = 25,
    log_level: Annotated[str, typer.Option(help="debug, info, warning or error.")] = "info",
) -> None:
    """The API of OpenAI over HTTP, in front of a Draftwood service.

    A request's key (Authorization: Bearer) goes on to the service, which knows its tenant by it. A request without one
    has the gateway's own credential, if it has one.
    """
    # Imported here: --help need not wait for them.
    from draftwood_service.logging_config import configure_logging

    try:
        with needs_extra("gateway", "`draftwood gateway`", ("httptools", "prometheus_client", "starlette", "uvicorn")):
            import uvicorn

            from draftwood_service.gateway.app import Gateway
            from draftwood_service.gateway.http.connections import BACKLOG, Connections, connection_limit
            from draftwood_service.gateway.http.protocol import protocol
    except MissingExtraError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(1) from None
    configure_logging(log_level, "console")
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # uvicorn handles it, and raises it again when it has ended
    made = Gateway(_opener(server), page, max_body_bytes)
    context = None if http_tls_cert is None else _tls(http_tls_cert, http_tls_key)
    connections = Connections(connection_limit(), ended=made.metrics.connection_ended)
    uvicorn.run(
        made.app(cors_origin or []),
        host=host,
        port=port,
        http=partial(protocol, connections, context),  # type: ignore[arg-type]  # uvicorn only calls it
        loop="auto" if context is None else "asyncio",  # see TlsProtocol
        ws="none",
        backlog=BACKLOG,
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=drain_grace,
    )


def _tls(certificate: Path, key: Path | None) -> ssl.SSLContext:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(certificate, key)
    return context


def _opener(server: ServerOptions) -> Callable[[Callable[[], str] | None], AsyncClient]:
    if server.api_key is not None or server.token is not None:
        _log.warning("the gateway has a credential: requests without a key of their own call with it")

    def open_client(credential: Callable[[], str] | None) -> AsyncClient:
        # The tenant is that of each request's credential, whatever the environment names for the command line.
        arguments: dict[str, Any] = {**server.arguments(), "tenant": ""}
        if credential is not None:
            arguments |= {"api_key": None, "token": credential}
        return AsyncClient(**arguments)

    return open_client
