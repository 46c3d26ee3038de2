"""Names of memories and of their keys in the store. Two memories never share a key, whatever their tenants' names.

All keys of a memory carry the same hash tag, so that a cluster keeps them in one slot and one script can change them
together: `dw:{FINGERPRINT:TENANT:ARM}:log`, and `:snap`, `:meta`, `:lease`, `:aside`.
"""

from __future__ import annotations

import hashlib
import hmac
from dataclasses import dataclass
from urllib.parse import quote

KINDS_KEY = "dw:{kinds}:served"
"""A sorted set of the kinds of memories (see `Naming.kind`) by the time at which a process last noted its use."""
_KEY_ID_DIGITS = 8
_MAX_QUOTED = 128
"""Characters; longer names are hashed. Keeps keys short; not tuned, any bound near works."""


@dataclass(frozen=True, slots=True, order=True)
class MemoryName:
    """Identifies a memory: the tenant, and the arm of an experiment ("" outside of experiments)."""

    tenant: str
    arm: str = ""


@dataclass(frozen=True, slots=True)
class Naming:
    """Tags of the memories of one model.

    Attributes:
        fingerprint: of model and tokenizer, hexadecimal digits.
        secret: if set, names appear in tags as HMAC-SHA256 with this key.
    """

    fingerprint: str
    secret: bytes | None = None

    def tag(self, name: MemoryName) -> str:
        """The hash tag: what stands between the braces of a memory's keys."""
        return f"{self.fingerprint}:{self.part(name.tenant)}:{self.part(name.arm)}"

    def tenant_prefix(self, tenant: str) -> str:
        """Common prefix of the tags of all memories of a tenant, and of no other tenant's."""
        return f"{self.fingerprint}:{self.part(tenant)}:"

    def is_of_arm(self, tag: str, arm: str) -> bool:
        """Whether a tag is of a memory of this arm, whatever its tenant and model."""
        return tag.rpartition(":")[2] == self.part(arm)

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


@dataclass(frozen=True, slots=True)
class Keys:
    """The keys of one memory."""

    log: str
    snapshot: str
    meta: str
    lease: str
    aside: str

    @classmethod
    def of(cls, tag: str) -> Keys:
        return cls(*(f"dw:{{{tag}}}:{suffix}" for suffix in ("log", "snap", "meta", "lease", "aside")))


def activity_keys(fingerprint: str) -> tuple[str, str]:
    """Of all memories of a model: a sorted set of tags by their last write, and the counter that scores the writes.

    The counter's key ends in `turn`; stores in use have it, so the key stays.
    """
    return f"dw:{{{fingerprint}}}:active", f"dw:{{{fingerprint}}}:turn"


def instances_key(fingerprint: str) -> str:
    """A hash of the processes that use a model's memories: instance to time and settings."""
    return f"dw:{{{fingerprint}}}:instances"


def quota_tag(tenant: str, secret: bytes | None = None) -> str:
    """The hash tag of the keys that count what a tenant uses of its limits, whatever the model."""
    return f"quota:{Naming('', secret).part(tenant)}"
