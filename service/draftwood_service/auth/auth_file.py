"""The file of API keys and client certificates: YAML, read by servers, changed by `draftwood key`.

keys:
- {id: 4k2m…, tenant: acme, role: caller, sha256: 9f86…, created: 2026-11-22T12:00:00Z, expires: 2027-11-22T12:00:00Z}
certificates:
- {name: spiffe://acme.example/billing, tenant: acme, role: caller}
- {common_name: ops.example, role: operator}
"""

from __future__ import annotations

import fcntl
import hashlib
import hmac
import os
import re
import secrets
import string
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, NamedTuple, Self

import yaml
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    ValidationError,
    model_validator,
)

from draftwood_model_runner.errors import InvalidInputError, InvalidValueError
from draftwood_service.auth.principal import Principal, Role, UnauthenticatedError

SETTING = "auth_file"
_PROBLEMS = {
    "extra_forbidden": "there is no such field",
    "missing": "is missing",
    "string_pattern_mismatch": "is not what `draftwood key create` writes",
}
"""What is wrong, by pydantic's type of the error, where its own words are not plain."""
PREFIX = "dw_"
"""Tells keys from other tokens, also to programs that look for leaked secrets."""
_ID_LENGTH = 12
_ID_LETTERS = string.ascii_lowercase + string.digits
_SECRET_BYTES = 32
_NOBODYS = "0" * 64
_FORM = re.compile(rf"{PREFIX}([a-z0-9]{{{_ID_LENGTH}}})_[A-Za-z0-9_-]{{43}}")


def _role(given: object) -> object:
    role = given if isinstance(given, Role) else Role.of(str(given))
    if role is None:
        raise ValueError(f"must be one of {', '.join(role.label for role in Role)}")
    return role


def _in_utc(given: datetime) -> datetime:
    return given.replace(tzinfo=UTC) if given.tzinfo is None else given.astimezone(UTC)


RoleByLabel = Annotated[Role, BeforeValidator(_role), PlainSerializer(lambda role: role.label)]
Instant = Annotated[
    datetime, AfterValidator(_in_utc), PlainSerializer(lambda at: f"{at:%Y-%m-%dT%H:%M:%SZ}", when_used="unless-none")
]
"""A time without a zone is UTC."""


class _Entry(BaseModel, ABC):
    """A credential. `tenant` is None only for operators."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    tenant: str | None = None
    role: RoleByLabel = Role.CALLER

    @property
    @abstractmethod
    def label(self) -> str:
        """Name of the principal."""

    @property
    def principal(self) -> Principal:
        """The caller of the credential."""
        return Principal(self.label, self.role, self.tenant)

    @model_validator(mode="after")
    def _has_principal(self) -> Self:
        try:
            _ = self.principal
        except InvalidValueError as error:
            raise ValueError(str(error)) from None
        return self


class KeyEntry(_Entry):
    """What is stored of an API key.

    Attributes:
        sha256: of the whole key, hexadecimal.
        expires: None for a key that is valid until it is revoked.
        note: for people.
    """

    id: str = Field(pattern="^[a-z0-9]{12}$")
    sha256: str = Field(pattern="^[0-9a-f]{64}$", repr=False)
    created: Instant
    expires: Instant | None = None
    note: str = ""

    @property
    def label(self) -> str:
        return f"key:{self.id}"


class CertificateEntry(_Entry):
    """The caller of the certificates with a name. Exactly one of the names is set.

    Attributes:
        name: one of the subject alternative names: of a host, a URI, an address.
        common_name: of the subject.
    """

    name: str | None = None
    common_name: str | None = None

    @property
    def label(self) -> str:
        return f"certificate:{self.name or self.common_name}"

    @model_validator(mode="after")
    def _has_one_name(self) -> Self:
        if bool(self.name) == bool(self.common_name):
            raise ValueError("must have either name (a subject alternative name) or common_name")
        return self


class AuthFile(BaseModel):
    """The content of the file."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    keys: tuple[KeyEntry, ...] = ()
    certificates: tuple[CertificateEntry, ...] = ()

    @model_validator(mode="after")
    def _each_once(self) -> Self:
        labels = Counter(entry.label for entry in (*self.keys, *self.certificates))
        for label, times in labels.most_common(1):
            if times > 1:
                raise ValueError(f"{label} occurs twice")
        return self


def parse(data: bytes) -> AuthFile:
    """The content of a file.

    Raises:
        InvalidInputError: it is not such a file, with the place of the first error.
    """
    try:
        content = yaml.safe_load(data)
        return AuthFile.model_validate({} if content is None else content)
    except ValidationError as error:
        first = error.errors()[0]
        place = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in first["loc"]).lstrip(".")
        text = _PROBLEMS.get(first["type"], first["msg"])
        problem = f"{place}: {text}" if place else text
        raise InvalidInputError(SETTING, None, problem.replace("Value error, ", "")) from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise InvalidInputError(SETTING, None, f"not valid YAML: {' '.join(str(error).split())}") from None


def read(path: Path) -> AuthFile:
    """The file's content. Raises InvalidInputError if it cannot be read."""
    try:
        return parse(path.read_bytes())
    except OSError as error:
        raise InvalidInputError(SETTING, path, f"cannot be read: {error.strerror}") from None


@contextmanager
def updated(path: Path) -> Iterator[list[KeyEntry]]:
    """The keys of a file, which is written with what the caller changes in the list. Comments are lost.

    A missing file is made, for its owner alone. One process at a time changes the files of a folder; readers see the
    old file or the new one.

    Raises:
        InvalidInputError: the file cannot be read or written.
    """
    try:
        folder = os.open(path.parent, os.O_RDONLY)
    except OSError as error:
        raise InvalidInputError(SETTING, path, f"cannot be written: {error.strerror}") from None
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        content = read(path) if path.exists() else AuthFile()
        keys = [*content.keys]
        yield keys
        entries = AuthFile(keys=tuple(keys), certificates=content.certificates)
        listed = entries.model_dump(exclude_none=True)
        _write(path, yaml.safe_dump(listed, sort_keys=False, allow_unicode=True))
    finally:
        os.close(folder)


def _write(path: Path, text: str) -> None:
    part = path.with_name(path.name + ".part")
    try:
        mode = path.stat().st_mode & 0o777 if path.exists() else 0o600
        part.unlink(missing_ok=True)
        with os.fdopen(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "w", encoding="utf-8") as out:
            out.write(text)
            out.flush()
            os.fsync(out.fileno())
        part.replace(path)
    except OSError as error:
        raise InvalidInputError(SETTING, path, f"cannot be written: {error.strerror}") from None


class NewKey(NamedTuple):
    """A key, which is shown once and not stored, and the two parts of its entry."""

    key: str
    id: str
    sha256: str


def new_key() -> NewKey:
    """A random key."""
    key_id = "".join(secrets.choice(_ID_LETTERS) for _ in range(_ID_LENGTH))
    key = f"{PREFIX}{key_id}_{secrets.token_urlsafe(_SECRET_BYTES)}"
    return NewKey(key, key_id, _hash(key))


class ApiKeys:
    """The keys of a server."""

    def __init__(self, entries: Iterable[KeyEntry] = ()) -> None:
        self._entries = {entry.id: entry for entry in entries}

    def principal(self, key: str, now: float) -> Principal:
        """The caller of a key.

        Args:
            now: seconds since 1970.

        Raises:
            UnauthenticatedError: it is not a valid key.
        """
        form = _FORM.fullmatch(key)
        if form is None:
            raise UnauthenticatedError("not an API key")
        entry = self._entries.get(form[1])
        # Compared with nobody's where no key has the id, so that a refusal takes the same time with a known and an
        # unknown one.
        if not hmac.compare_digest(_hash(key), _NOBODYS if entry is None else entry.sha256) or entry is None:
            raise UnauthenticatedError("unknown API key" if entry is None else f"wrong secret of key {form[1]}")
        if entry.expires is not None and entry.expires.timestamp() <= now:
            raise UnauthenticatedError(f"key {form[1]} has expired")
        return entry.principal


def _hash(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()
