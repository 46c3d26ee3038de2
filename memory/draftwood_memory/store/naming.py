"""Names of memories and of their keys in the store. Two memories never share a key, whatever their tenants' names.

All keys of a tenant have one hash tag, so that a cluster keeps them in one slot:

- `dw:{t:TENANT}:tenant`, a hash with the tenant's epochs (see `store.memories`), and
- `dw:{t:TENANT}:SCHEMA:FINGERPRINT:ARM:EPOCH`, the stream of one memory.

The other keys: `dw:{FINGERPRINT}:memories`, the tags of a model's memories by the time of their last write;
`dw:{purges}:tenants`, tenants by the time of their last purge, and `dw:{purges}:seen`, processes by the time up to
which they have applied purges; `dw:{kinds}:served`, the kinds of memories by the time of their last use by a process;
`dw:{wake:ID}`, a stream that ends a blocking read of one process.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from dataclasses import dataclass
from urllib.parse import quote

SCHEMA = 3
"""Version of everything that is stored of a memory: keys, the tenant's hash, entries, their encryption. Raised by every
change that an older program cannot read. A memory with a higher one is read and not changed."""
KINDS_KEY = "dw:{kinds}:served"
PURGES_KEY = "dw:{purges}:tenants"
PROCESSES_KEY = "dw:{purges}:seen"
_KEY_ID_DIGITS = 8
_MAX_QUOTED = 128
"""Characters; longer names are hashed. Keeps keys short."""

TENANT_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._~-]{0,127}")
"""Ids of tenants: what a segment of a resource's name may have without being encoded (AIP-122). Case counts, as ids are
those of other systems, and some have capital letters."""
TENANT_ID_ALLOWED = '1 to 128 letters (a to z), digits, "-", ".", "_" and "~", and begin with a letter or digit'


@dataclass(frozen=True, slots=True, order=True)
class MemoryName:
    """Identifies a memory: the tenant, and the arm of an experiment ("" outside of experiments)."""

    tenant: str
    arm: str = ""


@dataclass(frozen=True, slots=True)
class Naming:
    """Tags of the memories of one model: FINGERPRINT:TENANT:ARM, with the names quoted, hashed or hidden.

    Attributes:
        fingerprint: of model and tokenizer, hexadecimal digits.
        secret: if set, names appear in tags as HMAC-SHA256 with this key.
    """

    fingerprint: str
    secret: bytes | None = None

    def tag(self, name: MemoryName) -> str:
        """What identifies a memory in the store."""
        return f"{self.fingerprint}:{self.part(name.tenant)}:{self.part(name.arm)}"

    def tenant_prefix(self, tenant: str) -> str:
        """Common prefix of the tags of all memories of a tenant, and of no other tenant's."""
        return f"{self.fingerprint}:{self.part(tenant)}:"

    @property
    def kind(self) -> str:
        """Identifies all memories that processes with this naming use: FINGERPRINT:KEY, no KEY if names are plain."""
        return f"{self.fingerprint}:{self._key_id}"

    @property
    def _key_id(self) -> str:
        if self.secret is None:
            return ""
        return hashlib.sha256(b"draftwood names" + self.secret).hexdigest()[:_KEY_ID_DIGITS]

    def part(self, text: str) -> str:
        """A name without braces and colons. Quoted, hashed and keyed names start differently, so they never collide."""
        data = text.encode("utf-8", "surrogatepass")
        if self.secret is not None:
            return f"!{self._key_id}." + hmac.new(self.secret, data, hashlib.sha256).hexdigest()
        quoted = quote(data, safe="")
        return quoted if len(quoted) <= _MAX_QUOTED else "#" + hashlib.sha256(data).hexdigest()


def kind_of(tag: str) -> str:
    """The `Naming.kind` of a memory's tag."""
    fingerprint, tenant, _ = tag.split(":")
    return f"{fingerprint}:{tenant[1 : 1 + _KEY_ID_DIGITS] if tenant.startswith('!') else ''}"


def fingerprint_of(kind_or_tag: str) -> str:
    return kind_or_tag.partition(":")[0]


def tenant_part(tag: str) -> str:
    """The tenant as it is named in keys."""
    return tag.split(":")[1]


def arm_part(tag: str) -> str:
    """The arm as it is named in keys."""
    return tag.split(":")[2]


def tenant_key(part: str) -> str:
    """The hash of a tenant, by its name in keys."""
    return f"dw:{{t:{part}}}:tenant"


def stream_key(tag: str, epoch: int) -> str:
    """The stream of a memory in an epoch."""
    fingerprint, tenant, arm = tag.split(":")
    return f"{stream_prefix(tenant)}{fingerprint}:{arm}:{epoch}"


def stream_prefix(part: str) -> str:
    """What the keys of all streams of a tenant begin with, before the fingerprint."""
    return f"dw:{{t:{part}}}:{SCHEMA}:"


def memories_key(fingerprint: str) -> str:
    """The sorted set of a model's memories."""
    return f"dw:{{{fingerprint}}}:memories"


def wake_key(process: str) -> str:
    """The stream that ends a blocking read of a process."""
    return f"dw:{{wake:{process}}}"
