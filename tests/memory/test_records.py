"""Entries, names and encryption as bytes; records and outboxes in a process."""

from __future__ import annotations

import base64
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from hypothesis import example, given
from hypothesis import strategies as st

from draftwood_memory import MemoryConfig, MemoryName, MemoryOverrides
from draftwood_memory.config import Capacity
from draftwood_memory.errors import CorruptValueError, InvalidSettingError, NewerFormatError, UnknownKeyError
from draftwood_memory.records import (
    MAX_ENTRY_TOKENS,
    MAX_TOKENS,
    Codec,
    Kind,
    LoggedRecord,
    Outbox,
    PendingRecord,
    Record,
    RecordLog,
    batched,
    split,
)
from draftwood_memory.store.encryption import KeyRing, Plain, read_key_file, read_keys
from draftwood_memory.store.naming import Naming, kind_of, stream_key, tenant_key
from draftwood_memory.store.purges import id_order
from tests.memory.helpers import numbers, tokens_of

KEY = base64.b64encode(bytes(range(32))).decode()
OTHER = base64.b64encode(bytes(range(1, 33))).decode()
WRITER = b"process1"

records_of = st.lists(
    st.builds(
        lambda kind, tokens, at, request: Record(kind, np.array(tokens, np.int32), at, request),
        st.sampled_from(Kind),
        st.lists(st.integers(0, 2**31 - 2), min_size=1, max_size=40),
        st.integers(0, 2**32 - 1),
        st.integers(0, 2**32 - 1),
    ),
    min_size=1,
    max_size=8,
)


def plain(records: list[Record]) -> list[tuple[Kind, list[int], int, int]]:
    return [(one.kind, one.tokens.tolist(), one.learned_at, one.request) for one in records]


def record(token: int, count: int = 3, at: int = 0) -> Record:
    return Record(Kind.OUTPUT, np.full(count, token, np.int32), at)


@given(records_of)
@example([Record(Kind.OUTPUT, np.array([0, 0xFFFF], np.int32), 0)])
@example([Record(Kind.OUTPUT, np.array([0, 0x10000], np.int32), 0)])
def test_entries_decode_to_the_same(records: list[Record]) -> None:
    codec = Codec()
    writer, back = codec.decode("tag", 7, codec.encode("tag", 7, WRITER, records))
    assert (writer, plain(back)) == (WRITER, plain(records))


@given(records_of, st.binary(max_size=60), st.integers(0, 400), st.integers(0, 10_000), st.integers(1, 255))
def test_other_bytes_raise_corrupt_value_alone(
    records: list[Record], junk: bytes, cut: int, at: int, flip: int
) -> None:
    codec = Codec()
    whole = codec.encode("tag", 0, WRITER, records)
    changed = bytearray(whole)
    changed[at % len(changed)] ^= flip
    for data in (junk, whole[:cut], bytes(changed)):
        try:
            codec.decode("tag", 0, data)
        except CorruptValueError:
            continue


@pytest.mark.parametrize("junk", [b"", b"\xff", b"null", b"[]", b'["a"]', b'["a", "b", "c"]', b"[1, 2]", b'["a", 0]'])
def test_what_is_no_name_of_a_memory_is_a_corrupt_value(junk: bytes) -> None:
    codec, name = Codec(), MemoryName("a:b", "\u00e9")
    assert codec.decode_name("tag", codec.encode_name("tag", name)) == name
    with pytest.raises(CorruptValueError):
        codec.decode_name("tag", Plain().encrypt(junk, "tag", "name"))


def test_entries_of_a_newer_version_are_told_from_damaged_ones() -> None:
    codec = Codec()
    entry = codec.encode("tag", 0, WRITER, [record(1)])
    with pytest.raises(NewerFormatError, match="format 2"):
        codec.decode("tag", 0, entry[:1] + b"\x02" + entry[2:])
    with pytest.raises(NewerFormatError, match="kind 9"):
        codec.decode("tag", 0, codec.encode("tag", 0, WRITER, [Record(9, np.ones(3, np.int32), 0)]))  # type: ignore[arg-type]


def test_small_vocabularies_take_two_bytes_a_token() -> None:
    draw = np.random.default_rng(0)
    codec = Codec()
    small = codec.encode("t", 0, WRITER, [Record(Kind.OUTPUT, draw.integers(0, 65536, 1000).astype(np.int32), 0)])
    large = codec.encode("t", 0, WRITER, [Record(Kind.OUTPUT, draw.integers(0, 130_000, 1000).astype(np.int32), 0)])
    assert len(small) < 2100 < len(large)


def test_long_sequences_become_several_records_and_entries() -> None:
    pieces = split(np.arange(2 * MAX_ENTRY_TOKENS + 1, dtype=np.int32))
    assert {piece.size for piece in pieces} == {MAX_TOKENS, 1}
    found = [*batched([Record(Kind.OUTPUT, piece, 0) for piece in pieces])]
    assert [sum(one.tokens.size for one in run) for run in found] == [MAX_ENTRY_TOKENS, MAX_ENTRY_TOKENS, 1]
    assert [*batched([])] == []
    assert [len(run) for run in batched([record(1, 1)] * 5, max_tokens=2)] == [2, 2, 1]
    assert [len(run) for run in batched([record(1, 3)] * 2, max_tokens=2)] == [1, 1]


NASTY = ["a", "a:b", "a%3Ab", "{a}", "a}", "{", "a:", ":a", "", " ", "A", "é", "e\u0301", "%C3%A9", "!", "#", "\ud800"]
NASTY += ["x" * 1024, "x" * 1025, "é" * 512, "!" + "0" * 64, "#" + "0" * 64, "a\nb", "a\x00"]
NASTY += ["default", "dw:{f:a:}:log"]


@pytest.mark.parametrize("secret", [None, b"s" * 32])
def test_no_two_names_share_a_key(secret: bytes | None) -> None:
    naming = Naming("f" * 16, secret)
    tags = {naming.tag(MemoryName(tenant, arm)) for tenant in NASTY for arm in NASTY}
    assert len(tags) == len(NASTY) ** 2
    for tag in tags:
        assert tag.count(":") == 2
        assert not set("{}\n\x00 ") & set(tag)
        assert len(tag) < 300
        assert kind_of(tag) == naming.kind
    streams = {stream_key(tag, epoch) for tag in tags for epoch in (0, 1, 10)}
    hashes_of = {tenant_key(naming.part(tenant)) for tenant in NASTY}
    assert len(streams) == 3 * len(tags)
    assert len(hashes_of) == len(NASTY)
    assert not streams & hashes_of
    for tenant in NASTY:
        own = {stream_key(naming.tag(MemoryName(tenant, arm)), 1) for arm in NASTY}
        slots = {key[key.index("{") : key.index("}")] for key in (*own, tenant_key(naming.part(tenant)))}
        assert len(slots) == 1  # a cluster keeps what belongs together in one slot
    prefixes = [naming.tenant_prefix(tenant) for tenant in NASTY]
    for tenant, prefix in zip(NASTY, prefixes, strict=True):
        others = {naming.tag(MemoryName(other, "arm")) for other in NASTY if other != tenant}
        assert not any(tag.startswith(prefix) for tag in others)


def test_hidden_names_reveal_nothing() -> None:
    tag = Naming("f" * 16, b"s" * 32).tag(MemoryName("acme"))
    assert "acme" not in tag
    other = Naming("f" * 16, b"t" * 32)
    assert tag != other.tag(MemoryName("acme"))
    assert len({kind_of(tag), other.kind, Naming("f" * 16).kind, Naming("e" * 16).kind}) == 4


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


@pytest.mark.parametrize("key_id", ["a", "k" * 32, "clé", "é" * 16])
def test_any_id_that_is_accepted_names_a_key(key_id: str) -> None:
    """Behind another one, so that the value itself says which of the keys it is."""
    old = read_keys(f"names={OTHER}\n{key_id}={KEY}", "keys")
    rotated = read_keys(f"new={OTHER}\nnames={OTHER}\n{key_id}={KEY}", "keys")
    encrypted = old.encrypt(b"secret", "tenant", "log:1")
    assert rotated.decrypt(encrypted, "tenant", "log:1") == b"secret"
    for end in range(len(encrypted)):
        with pytest.raises(CorruptValueError):
            rotated.decrypt(encrypted[:end], "tenant", "log:1")


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


def test_key_files(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text(f"# made on Monday\n\nnames={OTHER}\nnew={KEY}\nold={OTHER}\n")
    ring = read_key_file(file, "store_key_file")
    assert [*ring.keys] == ["new", "old"]
    assert KEY not in repr(ring)
    assert str(ring.keys["new"]) not in repr(ring)
    with pytest.raises(InvalidSettingError, match="store_key_file"):
        read_key_file(tmp_path / "none", "store_key_file")


def steps_of(*names: str) -> st.SearchStrategy[list[tuple[str, int]]]:
    return st.lists(st.tuples(st.sampled_from(names), st.integers(1, 9)), max_size=40)


@given(steps_of("learned", "old", "resized"), st.integers(1, 60), st.integers(1, 8))
def test_a_log_keeps_the_newest_records_that_its_capacity_allows(
    steps: list[tuple[str, int]], tokens: int, records: int
) -> None:
    """As a list does that is cut at its begin. Records of one length are of one request."""
    capacity = Capacity(tokens, records * record(1).weight)
    log, kept, trimmed = RecordLog(capacity), list[LoggedRecord](), False
    for number, (step, length) in enumerate(steps):
        if step == "learned":
            kept.append(LoggedRecord(replace(record(number, length, at=number), request=length)))
            log.append(kept[-1])
        elif step == "resized":
            capacity = Capacity(tokens, length * record(1).weight)
            log.resize(capacity)
        else:
            younger = [held for held in kept if held.record.learned_at >= number - length]
            assert log.drop_older(number - length) == (younger != kept)
            kept, trimmed = younger, trimmed or younger != kept
        while len(kept) > 1 and exceeds(kept, capacity):
            kept.pop(0)
            trimmed = True
        assert ([*log], log.trimmed) == (kept, trimmed)
        assert log.tokens == sum(held.record.tokens.size for held in kept)
        assert log.nbytes == RecordLog(Capacity(1 << 20, 1 << 20), kept).nbytes
        for request in range(1, 10):
            assert log.of_request(request) == [held.record for held in kept if held.record.request == request]


def exceeds(logged: list[LoggedRecord], capacity: Capacity) -> bool:
    tokens = sum(held.record.tokens.size for held in logged)
    return tokens > capacity.tokens or sum(held.record.weight for held in logged) > capacity.bytes


@given(steps_of("learned", "read", "sent", "old"), st.integers(1, 60))
def test_the_store_keeps_every_entry_of_which_the_log_has_a_record(steps: list[tuple[str, int]], capacity: int) -> None:
    """Whatever comes first: what this process learned while the store was away, or what others wrote meanwhile."""
    log, unsent, sent = RecordLog(Capacity(capacity, 1 << 20)), list[LoggedRecord](), 100
    for number, (step, length) in enumerate(steps):
        if step == "learned":
            unsent.append(LoggedRecord(record(number, length, at=number)))
            log.append(unsent[-1])
        elif step == "read":
            log.append(LoggedRecord(record(number, length, at=number), b"%d-%d" % (length, number)))
        elif step == "sent" and unsent:
            sent += 1
            log.stored(unsent.pop(0), b"%d-0" % sent)
        elif step == "old":
            log.drop_older(number - length)
        ids = [logged.id for logged in log if logged.id is not None]
        assert log.first_id == min(ids, key=id_order, default=None)


def test_what_is_left_of_a_request_is_found_when_its_oldest_record_leaves() -> None:
    log = RecordLog(Capacity(20, 1 << 20))
    for number in (1, 2, 3):
        log.append(LoggedRecord(replace(record(number, 10, at=number), request=7)))
    assert [one.learned_at for one in log.of_request(7)] == [2, 3]
    log.append(LoggedRecord(record(4, 20)))
    assert log.of_request(7) == []


def test_the_servers_maximum_age_is_the_limit_of_a_tenants() -> None:
    config = MemoryConfig(max_age=1000.0, ttl=50.0)
    assert [config.under(MemoryOverrides(max_age=age)).max_age for age in (None, 10.0, 5000.0)] == [
        1000.0,
        10.0,
        1000.0,
    ]
    assert MemoryConfig().under(MemoryOverrides(max_age=10.0)).max_age == 10.0
    assert (config.stored_seconds, config.expiry, MemoryConfig(orphan_ttl=7.0).expiry) == (50.0, 50.0, 7.0)
    assert MemoryConfig().oldest(1e9) == -float("inf")


def pending(tenant: str, count: int, *, epoch: int = 0, age: float = 0.0) -> PendingRecord:
    """Of so many tokens."""
    learned = time.monotonic() - age
    held = LoggedRecord(Record(Kind.OUTPUT, tokens_of(*numbers(count)), 1))
    return PendingRecord(MemoryName(tenant), epoch, learned, learned, held)


def outbox_of(*records: PendingRecord, max_tokens: int) -> Outbox:
    outbox = Outbox(max_tokens, max_seconds=60.0)
    for one in records:
        outbox.add(one)
    return outbox


def test_what_could_not_be_sent_waits_again_in_its_order_and_the_oldest_are_dropped() -> None:
    a, b, c, d = (pending(tenant, 4) for tenant in "abcd")
    outbox = outbox_of(a, b, c, max_tokens=12)
    assert (outbox.take(5), outbox.pending) == ([a, b], 3)
    outbox.add(d)  # what was taken counts no more
    outbox.requeue([b])
    assert (outbox.pending, outbox.dropped) == (3, 0)
    assert outbox.take(1) == [b]  # one at least
    assert outbox.names() == {one.name for one in (b, c, d)}
    outbox.add(a)
    outbox.requeue([b])
    assert (outbox.take(4), outbox.dropped) == ([c], 1)
    outbox.requeue([])
    assert outbox.take(100) == [d, a]


def test_records_that_waited_for_too_long_are_not_sent() -> None:
    old, new = pending("a", 4, age=61.0), pending("a", 4, age=30.0)
    outbox = outbox_of(old, new, max_tokens=8)
    assert (outbox.take(1), outbox.pending, outbox.dropped) == ([new], 1, 1)


def test_stale_records_of_a_memory_are_discarded_and_no_others() -> None:
    stale, current, other = pending("a", 4), pending("a", 4, epoch=1), pending("b", 4)
    outbox = outbox_of(stale, current, other, max_tokens=12)
    assert outbox.discard(MemoryName("a"), lambda one: one.epoch == 0) == 1
    outbox.add(later := pending("a", 4))  # there is room for it
    assert (outbox.of(MemoryName("a")), outbox.of(MemoryName("b"))) == ([current, later], [other])
    assert (outbox.pending, outbox.dropped) == (3, 0)
