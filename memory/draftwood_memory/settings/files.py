"""What the settings of a store name on this machine, checked before a model is loaded: imports little."""

from __future__ import annotations

import ssl
from typing import TYPE_CHECKING

from draftwood_memory.errors import InvalidSettingError, StoreUnavailableError
from draftwood_memory.settings.memory_settings import MemorySettings
from draftwood_memory.store.embedded import binary, default_folder, make_folder

if TYPE_CHECKING:
    from draftwood_memory.store.encryption import KeyRing


def check_files(settings: MemorySettings) -> None:
    """Checks keys and PEM files, and the program and the folder of an embedded store, which it makes.

    Raises:
        InvalidSettingError: one of them cannot be used.
    """
    store_keys(settings)
    _check_pem(settings)
    if settings.store == "embedded":
        try:
            binary()
        except StoreUnavailableError as error:
            raise InvalidSettingError("store", settings.store, str(error)) from None
        make_folder(settings.store_folder or default_folder())


def store_keys(settings: MemorySettings) -> KeyRing | None:
    """The keys that encrypt stored values. Raises InvalidSettingError."""
    if settings.store_keys is None and settings.store_key_file is None:
        return None
    # Imported here: cryptography takes a while to import.
    from draftwood_memory.store.encryption import read_key_file, read_keys

    if settings.store_key_file is not None:
        return read_key_file(settings.store_key_file, "store_key_file")
    return read_keys(settings.store_keys or "", "store_keys")


def _check_pem(settings: MemorySettings) -> None:
    """Raises InvalidSettingError for a file with which no connection would succeed."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    ca, cert, key = settings.store_tls_ca, settings.store_tls_cert, settings.store_tls_key
    try:
        if ca is not None:
            context.load_verify_locations(ca)
    except OSError as error:
        problem = "has no PEM certificate" if isinstance(error, ssl.SSLError) else f"cannot be read: {error.strerror}"
        raise InvalidSettingError("store_tls_ca", ca, problem) from None
    try:
        if cert is not None:
            context.load_cert_chain(cert, key, password="")
    except OSError as error:
        problem = f"is no PEM certificate, or {key} is not its private key"
        if not isinstance(error, ssl.SSLError):
            problem = f"it or {key} cannot be read: {error.strerror}"
        raise InvalidSettingError("store_tls_cert", cert, problem) from None
