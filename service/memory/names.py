"""Names of keys. Two memories never share one, whatever their tenants are called.

All keys of a memory carry the same hash tag, so that they lie in one slot of a cluster and one script can change them
together: `dw:{FINGERPRINT:TENANT:ARM}:log`, and `:snap`, `:meta`, `:lease`, `:aside`.
"""

from __future__ import annotations

import hashlib
import hmac
from dataclasses import dataclass
from urllib.parse import quote

_LONGEST_QUOTED = 128


@dataclass(frozen=True, slots=True, order=True)
class MemoryName:
    """Whose memory: a tenant's, and within it that of one arm of an experiment ("" outside of experiments)."""

    tenant: str
    arm: str = ""


@dataclass(frozen=True, slots=True)
class Naming:
    """Tags of the memories of one model.

    Attributes:
        fingerprint: of model and tokenizer, hexadecimal digits.
        secret: where set, names stand in tags as HMAC-SHA256 with it.
    """

    fingerprint: str
    secret: bytes | None = None

    def tag(self, name: MemoryName) -> str:
        """What stands between the braces of a memory's keys."""
        return f"{self.fingerprint}:{self._part(name.tenant)}:{self._part(name.arm)}"

    def tenant_prefix(self, tenant: str) -> str:
        """What the tags of all of a tenant's memories begin with, and those of no other."""
        return f"{self.fingerprint}:{self._part(tenant)}:"

    def _part(self, text: str) -> str:
        """A name without braces and colons. Quoted, hashed and keyed names begin differently, so that none meet."""
        data = text.encode("utf-8", "surrogatepass")
        if self.secret is not None:
            return "!" + hmac.new(self.secret, data, hashlib.sha256).hexdigest()
        quoted = quote(data, safe="")
        return quoted if len(quoted) <= _LONGEST_QUOTED else "#" + hashlib.sha256(data).hexdigest()


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
        return cls(*(f"dw:{{{tag}}}:{name}" for name in ("log", "snap", "meta", "lease", "aside")))


def activity_keys(fingerprint: str) -> tuple[str, str]:
    """Of all memories of a model: who was written to last (a sorted set), and the count that orders it."""
    return f"dw:{{{fingerprint}}}:active", f"dw:{{{fingerprint}}}:turn"
