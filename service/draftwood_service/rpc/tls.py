"""TLS credentials that are read again when their files change, so that a renewed certificate needs no restart."""

from __future__ import annotations

import ssl
from pathlib import Path

import grpc

from draftwood_model_runner.errors import InvalidInputError
from draftwood_service.settings.network import ListenSettings


def server_credentials(settings: ListenSettings) -> grpc.ServerCredentials | None:
    """The credentials of the settings' certificate; None without one.

    With `tls_client_ca` only clients with a certificate of one of these authorities are served.

    Raises:
        InvalidInputError: a file cannot be read, or has no PEM, or the key is not that of the certificate.
    """
    if settings.tls_cert is None or settings.tls_key is None:
        return None
    files = _Files(settings.tls_cert, settings.tls_key, settings.tls_client_ca)
    _check(settings.tls_cert, settings.tls_key, settings.tls_client_ca)
    return grpc.dynamic_ssl_server_credentials(
        files.configuration(), files.current, require_client_authentication=settings.tls_client_ca is not None
    )


def _check(cert: Path, key: Path, client_ca: Path | None) -> None:
    """gRPC itself would only say that it cannot listen."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(cert, key, password="")  # gRPC takes no encrypted key
    except ssl.SSLError:
        problem = f"is no PEM certificate chain, or {key} is not its private key"
        raise InvalidInputError("tls_cert", cert, problem) from None
    try:
        if client_ca is not None:
            context.load_verify_locations(client_ca)
    except ssl.SSLError:
        raise InvalidInputError("tls_client_ca", client_ca, "has no PEM certificate") from None


class _Files:
    def __init__(self, cert: Path, key: Path, client_ca: Path | None) -> None:
        self._cert = cert
        self._key = key
        self._client_ca = client_ca
        self._stamps_served = self._stamps()
        self._served = self.configuration()

    def configuration(self) -> grpc.ServerCertificateConfiguration:
        return grpc.ssl_server_certificate_configuration(
            [(_read("tls_key", self._key), _read("tls_cert", self._cert))],
            None if self._client_ca is None else _read("tls_client_ca", self._client_ca),
        )

    def current(self) -> grpc.ServerCertificateConfiguration:
        """Called by gRPC at each handshake, on one of its threads."""
        try:
            stamps = self._stamps()
            if stamps != self._stamps_served:
                self._served = self.configuration()
                self._stamps_served = stamps
        except (OSError, InvalidInputError):
            pass  # only some of the files are renewed yet; a later handshake reads them all
        return self._served

    def _stamps(self) -> tuple[int, ...]:
        paths = (self._cert, self._key, self._client_ca)
        return tuple(path.stat().st_mtime_ns for path in paths if path is not None)


def _read(key: str, path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise InvalidInputError(key, path, f"cannot be read: {error.strerror}") from None
