"""Payloads of the attacks are what they claim to be."""

from __future__ import annotations

import pytest
from google.protobuf.message import DecodeError

from draftwood.v1 import generation_pb2 as pb
from tests.security.abuse import attacks


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """Payloads that attacks prepare."""
    payloads: list[bytes] = []
    monkeypatch.setattr(attacks, "_one_after_another", lambda method, payload: payloads.append(payload))
    return payloads


def test_a_chat_of_equal_messages(sent: list[bytes]) -> None:
    attacks._chat(b"\x0a\x04user", 300)
    request = pb.GenerateRequest.FromString(sent[0])
    assert [message.role for message in request.chat.messages] == ["user"] * 300
    assert request.tenant == attacks.ATTACKER


def test_the_last_byte_makes_it_malformed(sent: list[bytes]) -> None:
    attacks._chat(b"\x0a\x04user", 3, b"\x0f")
    with pytest.raises(DecodeError):
        pb.GenerateRequest.FromString(sent[0])


def test_empty_stop_strings(sent: list[bytes]) -> None:
    attacks._stop_strings(200)
    assert list(pb.GenerateRequest.FromString(sent[0]).stop.strings) == [""] * 200


def test_all_fit_into_a_message(sent: list[bytes]) -> None:
    for attack in attacks.ATTACKS:
        attack.prepare()
    assert len(sent) == 10
    assert max(map(len, sent)) < attacks.MAX_MESSAGE_BYTES
