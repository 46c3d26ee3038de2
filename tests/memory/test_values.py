"""Records, snapshots, names and encryption as bytes; logs and outboxes."""

from __future__ import annotations

import base64
from pathlib import Path

import numpy as np
import pytest
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from hypothesis import given
from hypothesis import strategies as st

from draftwood_model_runner.errors import InvalidValueError

KEY = base64.b64encode(bytes(range(32))).decode()
OTHER = base64.b64encode(bytes(range(1, 33))).decode()

tokens_of = st.lists(st.integers(0, 2**31 - 2), min_size=1, max_size=40)
records_of = st.lists(
    st.builds(
        lambda source, seq, kind, tokens, at: Record(f"{source:016x}", seq, kind, np.array(tokens, np.int32), at),
        st.integers(0, 2**64 - 1),
        st.integers(1, 2**53),
        st.sampled_from(Kind),
        tokens_of,
        st.integers(0, 2**32 - 1),
    ),
    max_size=8,
)


def plain(records: list[Record]) -> list[tuple[str, int, Kind, list[int], int]]:
    return [(one.source, one.seq, one.kind, one.tokens.tolist(), one.learned_at) for one in records]


def record(seq: int, count: int = 3, source: str = "0" * 16) -> Record:
    return Record(source, seq, Kind.OUTPUT, np.full(count, seq, np.int32))


@given(records_of)
def test_packed_records_unpack_to_the_same(records: list[Record]) -> None:
    assert plain(unpack(pack(records))) == plain(records)


@given(records_of, st.binary(max_size=60), st.integers(0, 400))
def test_other_bytes_raise_corrupt_value_and_nothing_else(records: list[Record], junk: bytes, cut: int) -> None:
    whole = pack(records)
    for data in (junk, whole[: cut % (len(whole) or 1)]):
        try:
            found = unpack(data)
        except CorruptValueError:
            continue
        assert data == whole[: len(data)] or plain(unpack(pack(found))) == plain(found)
        assert data != whole[: len(data)] or plain(found) == plain(records)[: len(found)]
        assert all(1 <= one.tokens.size <= MAX_TOKENS for one in found)


def test_records_of_a_newer_version_are_told_from_damaged_ones() -> None:
    data = pack([record(1)])
    with pytest.raises(NewerFormatError, match="format 3"):
        unpack(b"\x03" + data[1:])
    kind_at = 8 + 8 + 4 + 8  # after head, source, its number and the sequence number
    with pytest.raises(NewerFormatError, match="kind 7"):
        unpack(data[:kind_at] + b"\x07" + data[kind_at + 1 :])
    with pytest.raises(CorruptValueError, match="does not exist"):
        unpack(b"\x00" + data[1:])


def test_small_vocabularies_take_two_bytes_a_token() -> None:
    small, large = (pack([Record("0" * 16, 1, Kind.OUTPUT, np.full(1000, top, np.int32))]) for top in (65_535, 65_536))
    assert len(small) < 2050
    assert len(large) < 4050


def test_long_sequences_become_several_records() -> None:
    tokens = np.arange(2 * MAX_TOKENS + 5, dtype=np.int32)
    assert np.concatenate(split(tokens)).tolist() == tokens.tolist()
    assert [part.size for part in split(tokens)] == [MAX_TOKENS, MAX_TOKENS, 5]


@given(records_of)
def test_encoded_snapshots_decode_to_the_same(records: list[Record]) -> None:
    data = snapshots.encode(snapshots.Snapshot("f" * 16, 3, 70, "c" * 16, records))
    back = snapshots.decode(data, "f" * 16)
    assert (back.epoch, back.position, back.chain, plain(back.records)) == (3, 70, "c" * 16, plain(records))


@given(st.integers(0, 10_000), st.integers(1, 255))
def test_one_changed_byte_of_a_snapshot_is_noticed(at: int, flip: int) -> None:
    data = bytearray(snapshots.encode(snapshots.Snapshot("f" * 16, 0, 2, "", [record(1), record(2)])))
    data[at % len(data)] ^= flip
    with pytest.raises(CorruptValueError):
        snapshots.decode(bytes(data), "f" * 16)


def test_snapshots_of_other_models_and_versions_are_refused() -> None:
    data = snapshots.encode(snapshots.Snapshot("f" * 16, 0, 0, "", []))
    with pytest.raises(ForeignValueError, match="of the model"):
        snapshots.decode(data, "e" * 16)
    newer = data[:8] + (snapshots.VERSION + 1).to_bytes(2, "little") + b"anything at all" * 5
    with pytest.raises(NewerFormatError, match="version 2"):
        snapshots.decode(newer, "f" * 16)


NASTY = ["a", "a:b", "a%3Ab", "{a}", "a}", "{", "a:", ":a", "", " ", "A", "é", "e\u0301", "%C3%A9", "!", "#", "\ud800"]
NASTY += [
    "x" * 1024,
    "x" * 1025,
    "é" * 512,
    "!" + "0" * 64,
    "#" + "0" * 64,
    "a\nb",
    "a\x00",
    "default",
    "dw:{f:a:}:log",
]


@pytest.mark.parametrize("secret", [None, b"s" * 32])
def test_no_two_names_share_a_key(secret: bytes | None) -> None:
    naming = Naming("f" * 16, secret)
    tags = {naming.tag(MemoryName(tenant, arm)) for tenant in NASTY for arm in NASTY}
    assert len(tags) == len(NASTY) ** 2
    for tag in tags:
        assert tag.count(":") == 2
        assert not set("{}\n\x00 ") & set(tag)
        assert len(tag) < 300
        assert Keys.of(tag).log == f"dw:{{{tag}}}:log"
    prefixes = [naming.tenant_prefix(tenant) for tenant in NASTY]
    for tenant, prefix in zip(NASTY, prefixes, strict=True):
        others = {naming.tag(MemoryName(other, "arm")) for other in NASTY if other != tenant}
        assert not any(tag.startswith(prefix) for tag in others)


@given(st.text(), st.text(), st.text(), st.text())
def test_names_differ_if_and_only_if_tags_do(tenant: str, arm: str, other: str, other_arm: str) -> None:
    naming = Naming("f" * 16)
    one, two = MemoryName(tenant, arm), MemoryName(other, other_arm)
    assert (naming.tag(one) == naming.tag(two)) == (one == two)


def test_hidden_names_reveal_nothing() -> None:
    tag = Naming("f" * 16, b"s" * 32).tag(MemoryName("acme"))
    assert "acme" not in tag
    assert tag != Naming("f" * 16, b"t" * 32).tag(MemoryName("acme"))


def test_encrypted_values_decrypt_in_their_context_only() -> None:
    ring = read_keys(f"names={OTHER}\na={KEY}", "keys")
    encrypted = ring.encrypt(b"secret", "tenant", "log:1")
    assert b"secret" not in encrypted
    assert ring.encrypt(b"secret", "tenant", "log:1") != encrypted
    assert ring.decrypt(encrypted, "tenant", "log:1") == b"secret"
    for damaged, tag, context in (
        (encrypted, "other", "log:1"),
        (encrypted, "tenant", "log:2"),
        (encrypted[:-1] + bytes([encrypted[-1] ^ 1]), "tenant", "log:1"),
        (encrypted[:9], "tenant", "log:1"),
        (b"", "tenant", "log:1"),
    ):
        with pytest.raises(CorruptValueError):
            ring.decrypt(damaged, tag, context)
    for newer in (ring, Plain()):
        with pytest.raises(NewerFormatError, match="format 2"):
            newer.decrypt(b"\x02" + encrypted[1:], "tenant", "log:1")
    with pytest.raises(CorruptValueError):
        ring.decrypt(Plain().encrypt(b"forged", "tenant", "log:1"), "tenant", "log:1")
    with pytest.raises(UnknownKeyError, match="no key is set"):
        Plain().decrypt(encrypted, "tenant", "log:1")
    with pytest.raises(UnknownKeyError, match="'a'"):
        KeyRing({"b": bytes(32)}, bytes(32)).decrypt(encrypted, "tenant", "log:1")


def test_each_memory_has_keys_of_its_own() -> None:
    """So that one key does not come near the number of values that random nonces allow."""
    ring = read_keys(f"names={OTHER}\na={KEY}", "keys")
    encrypted = ring.encrypt(b"secret", "tenant", "log:1")
    nonce, rest = encrypted[3:15], encrypted[15:]
    for key in (ring.keys["a"], ring.naming_key):
        with pytest.raises(InvalidTag):
            AESGCM(key).decrypt(nonce, rest, b"\x01\x01a\x00tenant\x00log:1")
    derived = HKDF(hashes.SHA256(), 32, salt=None, info=b"draftwood memory\x00tenant").derive(ring.keys["a"])
    assert AESGCM(derived).decrypt(nonce, rest, b"\x01\x01a\x00tenant\x00log:1") == b"secret"


@pytest.mark.parametrize(
    "text",
    ["", f"a={KEY}", f"names={KEY}", f"names={KEY},a=short", f"names={KEY},a=%%%", f"names={KEY},a={KEY},a={KEY}"],
)
def test_bad_keys_are_refused_and_never_shown(text: str) -> None:
    with pytest.raises(InvalidValueError, match="store_keys") as raised:
        read_keys(text, "store_keys")
    assert KEY not in str(raised.value)


def test_key_files(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text(f"# made on Monday\n\nnames={OTHER}\nnew={KEY}\nold={OTHER}\n")
    ring = read_key_file(file, "store_key_file")
    assert [*ring.keys] == ["new", "old"]
    assert KEY not in repr(ring)
    assert str(ring.keys["new"]) not in repr(ring)
    with pytest.raises(InvalidValueError, match="store_key_file"):
        read_key_file(tmp_path / "none", "store_key_file")


def test_a_log_keeps_the_newest_records() -> None:
    log = TenantLog(Capacity(10, 1 << 20))
    chain = ""
    for seq in range(1, 8):
        log.append(record(seq), bytes([seq]))
        chain = chained(chain, bytes([seq]))
    assert [one.seq for one in log] == [5, 6, 7]
    assert (log.position, log.chain, log.tokens) == (7, chain, 9)
    log.append(record(8, 50), b"8")
    assert [one.seq for one in log] == [8]
    log.append(None, b"unreadable")
    assert (log.position, len(log)) == (9, 1)


class TestOutbox:
    name, other = MemoryName("t"), MemoryName("u")

    def filled(self, count: int, **limits: float) -> Outbox:
        outbox = Outbox("0" * 16, **limits)  # type: ignore[arg-type]
        for _ in range(count):
            outbox.add(self.name, 0, Kind.OUTPUT, np.ones(10, np.int32))
        return outbox

    def seqs(self, outbox: Outbox, tokens: int = 1000) -> list[int]:
        return [waiting.record.seq for waiting in outbox.take(self.name, tokens)]

    def test_records_stay_until_they_are_confirmed(self) -> None:
        outbox = self.filled(5)
        assert self.seqs(outbox, 25) == [1, 2]
        assert self.seqs(outbox, 1) == [1]
        outbox.confirm(self.name, 3)
        assert self.seqs(outbox) == [4, 5]
        assert (outbox.pending, outbox.retained) == (2, 3)

    def test_what_the_store_lost_is_sent_again_in_order(self) -> None:
        outbox = self.filled(5)
        outbox.confirm(self.name, 4)
        assert outbox.rewind(self.name, 2) == 2
        assert self.seqs(outbox) == [3, 4, 5]
        assert outbox.rewind(self.name, 2) == 0

    def test_the_oldest_are_dropped_when_it_is_full(self) -> None:
        outbox = self.filled(5, max_tokens=30, retained_tokens=30)
        assert self.seqs(outbox) == [3, 4, 5]
        assert outbox.dropped == 2
        outbox.confirm(self.name, 5)
        assert (outbox.retained, outbox.dropped) == (3, 2)
        for _ in range(3):
            outbox.add(self.other, 0, Kind.OUTPUT, np.ones(10, np.int32))
        outbox.confirm(self.other, 8)
        assert outbox.rewind(self.name, 0) == 0

    def test_nothing_confirmed_is_kept_for_a_store_that_loses_nothing(self) -> None:
        outbox = self.filled(5, retained_tokens=0)
        outbox.confirm(self.name, 3)
        assert (outbox.pending, outbox.retained, outbox.confirmed(self.name)) == (2, 0, 0)

    def test_records_that_are_too_old_are_dropped(self) -> None:
        outbox = self.filled(2, max_seconds=5.0)
        outbox._clock = lambda: 1e12
        outbox.add(self.name, 0, Kind.OUTPUT, np.ones(10, np.int32))
        assert self.seqs(outbox) == [3]
        assert outbox.dropped == 2

    def test_a_purge_drops_earlier_records(self) -> None:
        outbox = Outbox("0" * 16)
        now = 100.0
        outbox._clock = lambda: now
        outbox.add(self.name, 1, Kind.OUTPUT, np.ones(1, np.int32))
        outbox.add(self.name, None, Kind.OUTPUT, np.ones(1, np.int32))
        now = 200.0
        outbox.add(self.name, None, Kind.OUTPUT, np.ones(1, np.int32))
        outbox.add(self.other, 1, Kind.OUTPUT, np.ones(1, np.int32))
        now = 201.0
        assert outbox.settle(self.name, 2, since_purge=50.0) == 2
        assert self.seqs(outbox) == [3]
        assert outbox.take(self.name, 1)[0].epoch == 2
        assert outbox.pending == 2
