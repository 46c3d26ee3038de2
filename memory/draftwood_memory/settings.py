"""The settings of memories and their store, for servers and plug-ins, and the files that they name. Imports little."""

from __future__ import annotations

import operator
import ssl
from collections.abc import Callable, Mapping
from dataclasses import Field, dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args, get_type_hints

from draftwood_memory.errors import InvalidSettingError, StoreUnavailableError
from draftwood_memory.store.embedded import binary, default_folder, make_folder, socket_url

if TYPE_CHECKING:
    from draftwood_memory.store.encryption import KeyRing
    from draftwood_memory.store.redis_client import RedisClient


ENV_PREFIX = "DRAFTWOOD_"
_MIB = 1024 * 1024
_SUFFIXES = {"K": 1024, "M": _MIB, "G": 1024 * _MIB}
_BOUNDS: dict[str, tuple[str, Callable[[Any, Any], bool]]] = {
    "ge": ("at least", operator.ge),
    "gt": ("greater than", operator.gt),
    "le": ("at most", operator.le),
}


def _about(description: str, *, size: bool = False, **bounds: float) -> dict[str, Any]:
    """Metadata of a field: its `bounds` are `ge`, `gt` and `le`; the text of a `size` may have a suffix."""
    return {"description": description, "size": size, **bounds}


@dataclass(frozen=True, slots=True)
class MemorySettings:
    """One consistent set of settings. Durations are in seconds, sizes in bytes.

    Raises:
        InvalidSettingError: a value is not allowed.
    """

    strategy: str = field(default="hybrid", metadata=_about("Default drafting strategy; `none` disables drafting"))
    max_draft_nodes: int = field(
        default=48, metadata=_about("Maximum number of draft tokens a step and request", le=1024)
    )
    max_tenants: int = field(default=1000, metadata=_about("Maximum number of tenants with their memory in RAM", ge=1))
    store: str = field(
        default="memory",
        metadata=_about(
            "Storage backend of learned memories, and of tenants and experiments that are made over the API:"
            " memory (this process only), embedded (a Valkey server that"
            " the service runs), or the URL of a Redis or Valkey server: redis://, rediss://, redis+sentinel://,"
            " redis+cluster://, unix://"
        ),
    )
    store_folder: Path | None = field(
        default=None, metadata=_about("Data folder of the embedded store; unset: ~/.local/share/draftwood/store")
    )
    store_bytes: int = field(
        default=1024 * _MIB, metadata=_about("Maximum memory of the embedded store", ge=8 * _MIB, size=True)
    )
    store_timeout: float = field(default=2.0, metadata=_about("Timeout of a call to the store in seconds", gt=0))
    store_tls_ca: Path | None = field(default=None, metadata=_about("PEM certificate authorities of a store with TLS"))
    store_tls_cert: Path | None = field(default=None, metadata=_about("PEM client certificate for the store"))
    store_tls_key: Path | None = field(default=None, metadata=_about("PEM private key of that certificate"))
    store_keys: str | None = field(
        default=None,
        repr=False,
        metadata=_about("Keys that encrypt stored values; safer in the environment than in a flag"),
    )
    store_key_file: Path | None = field(default=None, metadata=_about("File with keys that encrypt stored values"))
    memory_tokens: int = field(
        default=1_000_000, metadata=_about("Maximum number of tokens of a tenant's memory", ge=1024)
    )
    memory_bytes: int = field(
        default=16 * _MIB, metadata=_about("Maximum size of a tenant's memory in bytes", ge=65536, size=True)
    )
    memory_max_bytes: int | None = field(
        default=None,
        metadata=_about(
            "Maximum size of all tenants' memories in RAM in bytes; the least recently used are evicted; unset:"
            " a quarter of the RAM",
            ge=16 * _MIB,
            size=True,
        ),
    )
    memory_ttl: float = field(
        default=0.0,
        metadata=_about("Seconds without learning until a tenant's memory expires; 0: memory_orphan_ttl decides", ge=0),
    )
    memory_max_age: float = field(
        default=0.0, metadata=_about("Seconds until a record of a tenant's memory is dropped; 0 for never", ge=0)
    )
    memory_orphan_ttl: float = field(
        default=30 * 24 * 3600.0,
        metadata=_about(
            "Seconds after which the store deletes a memory that no server wrote to or loaded; 0 for never", ge=0
        ),
    )
    memory_idle: float = field(
        default=900.0, metadata=_about("Seconds without requests until a tenant's memory is evicted from RAM", gt=0)
    )
    memory_preload: int = field(
        default=16, metadata=_about("Number of memories, the latest written, that are loaded at the start", ge=0)
    )

    def __post_init__(self) -> None:
        for setting in fields(self):
            _check_bounds(setting, getattr(self, setting.name))
        check_store(self)


def definition_of(name: str) -> Mapping[str, Any]:
    """The default of a setting, its description and bounds: `default`, `description`, `ge`, `gt`, `le`, `repr`."""
    setting: Field[Any] = MemorySettings.__dataclass_fields__[name]
    about = {key: value for key, value in setting.metadata.items() if key != "size"}
    return {"default": setting.default, "repr": setting.repr, **about}


def check_store(settings: Any) -> None:
    """Checks that settings of a store, as in `MemorySettings`, fit together. Raises InvalidSettingError."""
    for missing, present in (("store_tls_cert", "store_tls_key"), ("store_tls_key", "store_tls_cert")):
        if getattr(settings, missing) is None and getattr(settings, present) is not None:
            raise InvalidSettingError(missing, None, f"must be set, since {present} is set")
    if settings.store_keys is not None and settings.store_key_file is not None:
        raise InvalidSettingError("store_key_file", None, "cannot be combined with store_keys")
    for name in ("store_tls_ca", "store_tls_cert", "store_tls_key", "store_key_file"):
        path: Path | None = getattr(settings, name)
        if path is not None and not path.is_file():
            raise InvalidSettingError(name, path, "no such file")


def size_of(given: object) -> object:
    """A number of bytes of text with the suffix K, M or G; anything else as it is."""
    if isinstance(given, str) and given[-1:].upper() in _SUFFIXES and given[:-1].isdecimal():
        return int(given[:-1]) * _SUFFIXES[given[-1].upper()]
    return given


def read_environment(environ: Mapping[str, str], **defaults: Any) -> MemorySettings:
    """The settings that variables `DRAFTWOOD_...` give. Those of a server alone are left out.

    Args:
        defaults: values of a plug-in's own, where a variable is not set.

    Raises:
        InvalidSettingError: a value is not allowed; it names the setting.
    """
    kinds, given = get_type_hints(MemorySettings), dict(defaults)
    for setting in fields(MemorySettings):
        text = environ.get(ENV_PREFIX + setting.name.upper(), "")
        if text:
            given[setting.name] = _parsed(setting, kinds[setting.name], text)
    return MemorySettings(**given)


def cache_folder(environ: Mapping[str, str]) -> Path | None:
    """Where Draftwood's processes keep what the next start finds; None for a user without a home."""
    try:
        return Path(environ.get("XDG_CACHE_HOME") or "~/.cache", "draftwood", "models").expanduser()
    except RuntimeError:  # as in some containers
        return None


def _parsed(setting: Field[Any], kind: Any, text: str) -> Any:
    kind = next((part for part in get_args(kind) if part is not type(None)), kind)
    try:
        return kind(size_of(text) if setting.metadata.get("size") else text)
    except ValueError:
        shown = {int: "a whole number", float: "a number"}.get(kind, kind.__name__)
        raise InvalidSettingError(setting.name, text, f"must be {shown}") from None


def _check_bounds(setting: Field[Any], value: Any) -> None:
    for key, (words, holds) in _BOUNDS.items():
        bound = setting.metadata.get(key)
        if bound is not None and value is not None and not holds(value, bound):
            raise InvalidSettingError(setting.name, value, f"must be {words} {bound:g}")


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


def store_client(settings: MemorySettings, timeout: float | None = None) -> RedisClient | None:
    """A client that connects when it is first used; None if there is no server (`store` is "memory").

    Args:
        timeout: seconds of a call; None for that of the settings.

    Raises:
        InvalidSettingError: the URL is wrong.
    """
    if settings.store == "memory":
        return None
    # Imported here: the Redis library takes a while to import.
    from draftwood_memory.store.redis_client import RedisClient, RedisTls

    seconds = settings.store_timeout if timeout is None else timeout
    if settings.store == "embedded":
        return RedisClient(socket_url(settings.store_folder or default_folder()), None, seconds)
    tls = RedisTls(settings.store_tls_ca, settings.store_tls_cert, settings.store_tls_key)
    return RedisClient(settings.store, tls, seconds)


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
