"""How resources look in a store: with keys set, their names are hidden and their values encrypted, as memories are."""

from __future__ import annotations

from draftwood_memory.errors import CorruptValueError
from draftwood_memory.store.encryption import KeyRing, Plain
from draftwood_memory.store.naming import Naming

_LENGTH_BYTES = 2


class ResourceCipher:
    """Between a resource and its key and value in a store.

    Args:
        keys: None stores names and values as they are.
    """

    def __init__(self, keys: KeyRing | None) -> None:
        self._values = keys or Plain()
        self._secret = keys.naming_key if keys else None

    def key(self, kind: str, name: str) -> str:
        """ "KIND:NAME:", the name quoted, or hidden."""
        return Naming(kind, self._secret).tenant_prefix(name)

    def is_own(self, key: str) -> bool:
        """Whether a key's name is written as this writes names: plain, or hidden with the same key."""
        kind, _, rest = key.partition(":")
        hidden = Naming(kind, self._secret).tenant_prefix("").partition(":!")[2].partition(".")[0]
        return rest.startswith(f"!{hidden}.") if hidden else not rest.startswith("!")

    def encrypt(self, kind: str, name: str, value: bytes) -> bytes:
        """The name and the value, bound to their key."""
        encoded = name.encode()
        joined = len(encoded).to_bytes(_LENGTH_BYTES) + encoded + value
        return self._values.encrypt(joined, self.key(kind, name), "resource")

    def decrypt(self, key: str, data: bytes) -> tuple[str, str, bytes]:
        """Kind, name and value. Raises CorruptValueError."""
        joined = self._values.decrypt(data, key, "resource")
        end = _LENGTH_BYTES + int.from_bytes(joined[:_LENGTH_BYTES])
        kind, name = key.partition(":")[0], joined[_LENGTH_BYTES:end].decode(errors="replace")
        if self.key(kind, name) != key:
            raise CorruptValueError("the value is another resource's, or cut short")
        return kind, name, joined[end:]
