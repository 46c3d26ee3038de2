"""TLS settings of clients."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import grpc

from draftwood_client import environment
from draftwood_client.errors import ArgumentValueError


@dataclass(frozen=True, slots=True)
class TlsConfig:
    """TLS settings; certificates and keys are PEM bytes.

    Attributes:
        root_certificates: trusted authorities; None for gRPC's own set of public authorities.
        certificate_chain, private_key: the client certificate, for servers that require one. Both or neither.
        server_name: the name on the server's certificate, if it differs from the host of the target.

    Raises:
        ArgumentValueError: only one of `certificate_chain` and `private_key` is given.
    """

    root_certificates: bytes | None = None
    certificate_chain: bytes | None = None
    private_key: bytes | None = field(default=None, repr=False)
    server_name: str | None = None

    def __post_init__(self) -> None:
        if (self.certificate_chain is None) != (self.private_key is None):
            raise ArgumentValueError("tls", "certificate_chain and private_key must be given together")

    @classmethod
    def from_files(
        cls,
        root_certificates: str | Path | None = None,
        certificate_chain: str | Path | None = None,
        private_key: str | Path | None = None,
        server_name: str | None = None,
    ) -> TlsConfig:
        """Reads PEM files.

        Raises:
            ArgumentValueError: a file cannot be read, or only one of certificate and key is given.
        """
        return cls(
            _pem("root_certificates", root_certificates),
            _pem("certificate_chain", certificate_chain),
            _pem("private_key", private_key),
            server_name,
        )

    @classmethod
    def from_environment(cls) -> TlsConfig | None:
        """None if no variable asks for TLS. Raises `ArgumentValueError`."""
        ca, certificate = environment.read(environment.TLS_CA), environment.read(environment.CLIENT_CERT)
        key, name = environment.read(environment.CLIENT_KEY), environment.read(environment.TLS_SERVER_NAME)
        if not (environment.switch(environment.TLS) or ca or certificate or key or name):
            return None
        return cls.from_files(ca, certificate, key, name)

    def credentials(self) -> grpc.ChannelCredentials:
        return grpc.ssl_channel_credentials(self.root_certificates, self.private_key, self.certificate_chain)


def _pem(name: str, path: str | Path | None) -> bytes | None:
    if path is None:
        return None
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise ArgumentValueError(f"tls.{name}", f"cannot read {str(path)!r}: {error.strerror}") from error
