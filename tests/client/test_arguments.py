"""Invalid arguments are refused before anything is sent, and the message names them."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import draftwood_client
from draftwood_client import (
    ArgumentError,
    ArgumentTypeError,
    ArgumentValueError,
    AsyncClient,
    Client,
    RetryPolicy,
    TlsConfig,
    UnavailableError,
)
from draftwood_client.errors import ErrorDetails, StatusError, error_for
from draftwood_client.retry import Attempts
from tests.client.fake_server import FakeServer

BAD_PROMPTS: list[tuple[Any, type[Exception], str]] = [
    (None, TypeError, "prompt: must be text, token ids or chat messages, not None"),
    (b"bytes", TypeError, "prompt: must be text, token ids or chat messages, not bytes"),
    ({"role": "user", "content": "x"}, TypeError, "prompt: must be text, token ids or chat messages, not dict"),
    ([], ValueError, "prompt: must hold at least one token id or chat message"),
    ("a\ud800", ValueError, r"prompt: character 1 is the unpaired surrogate '\ud800', which is not text"),
    ([1, "2"], TypeError, "prompt[1]: must be an int, not str"),
    ([1, True], TypeError, "prompt[1]: must be an int, not bool"),
    ([1, -2], ValueError, "prompt[1]: -2 is not allowed; it must lie in [0, 2147483647]"),
    ([{"role": "user", "content": "x"}, 3], TypeError, "prompt[1]: must be a ChatMessage or a mapping, not int"),
    ([{"role": "user"}], ValueError, "prompt[0]: needs the keys 'role' and 'content' and no others; it has 'role'"),
    ([{"role": "user", "content": 3}], TypeError, "prompt[0].content: must be a str, not int"),
]
BAD_OPTIONS: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"timeout": -1}, ValueError, "timeout: -1 is not allowed; it must be above 0 seconds"),
    ({"timeout": float("nan")}, ValueError, "timeout: nan is not allowed; it must be above 0 seconds"),
    ({"timeout": "1"}, TypeError, "timeout: must be a number of seconds, not str"),
    ({"max_token": 5}, TypeError, "max_token: there is no such option; did you mean 'max_tokens'?"),
    ({"max_tokens": 2**31}, ValueError, "max_tokens: 2147483648 is not allowed; it must lie in"),
    ({"max_tokens": 1.5}, TypeError, "max_tokens: must be an int, not float"),
    ({"seed": -1}, ValueError, "seed: -1 is not allowed; it must lie in [0, 18446744073709551615]"),
    ({"temperature": float("inf")}, ValueError, "temperature: inf is not allowed; it must be finite"),
    ({"temperature": "hot"}, TypeError, "temperature: must be a number, not str"),
    ({"drafting": 1}, TypeError, "drafting: must be a bool, not int"),
    ({"stop": ["a", 3]}, TypeError, "stop[1]: must be a str, not int"),
    ({"tenant": "\udfff"}, ValueError, "tenant: character 0 is the unpaired surrogate"),
]


@pytest.mark.parametrize(("prompt", "kind", "message"), BAD_PROMPTS)
def test_bad_prompts(server: FakeServer, prompt: Any, kind: type[Exception], message: str) -> None:
    with Client(server.target) as client, pytest.raises(ArgumentError) as caught:
        client.stream(prompt)
    assert isinstance(caught.value, kind)
    assert str(caught.value) == message
    assert server.requests == []


@pytest.mark.parametrize(("options", "kind", "message"), BAD_OPTIONS)
def test_bad_options(server: FakeServer, options: dict[str, Any], kind: type[Exception], message: str) -> None:
    async def ask() -> None:
        async with AsyncClient(server.target) as client:
            await client.generate("x", **options)

    with pytest.raises(ArgumentError) as caught:
        asyncio.run(ask())
    assert isinstance(caught.value, kind)
    assert str(caught.value).startswith(message)
    assert caught.value.argument == next(iter(options)) or caught.value.argument == "stop[1]"
    assert server.requests == []


def test_bad_connections(tmp_path: Path) -> None:
    with pytest.raises(ArgumentValueError, match="target: is empty"):
        Client("")
    with pytest.raises(ArgumentTypeError, match="target: must be a str, not int"):
        AsyncClient(50051)  # type: ignore[arg-type]
    with pytest.raises(ArgumentValueError, match="given together"):
        TlsConfig(certificate_chain=b"x")
    with pytest.raises(ArgumentValueError, match=r"tls\.root_certificates: cannot read .*No such file"):
        TlsConfig.from_files(tmp_path / "nothing.pem")
    with pytest.raises(ArgumentValueError, match=r"retry\.multiplier: 0\.5 is not allowed; it must be at least 1"):
        RetryPolicy(multiplier=0.5)


def test_secrets_stay_out_of_reprs() -> None:
    assert "hush" not in repr(TlsConfig(certificate_chain=b"public", private_key=b"hush"))
    with Client("localhost:1", token="hush") as client:
        assert "hush" not in repr(client)


def test_integers_of_other_libraries_are_token_ids(server: FakeServer) -> None:
    class Id:
        def __index__(self) -> int:
            return 7

    with Client(server.target) as client:
        client.generate((Id(), Id()))  # type: ignore[arg-type]
    assert server.requests[0].token_ids.ids == [7, 7]


def unavailable(retry_after: float | None = None) -> StatusError:
    import grpc

    return error_for(ErrorDetails(grpc.StatusCode.UNAVAILABLE, "full", retry_after=retry_after, retryable=True))


@given(
    attempts=st.integers(2, 40),
    initial=st.floats(0, 2),
    multiplier=st.floats(1, 10),
    longest=st.floats(0, 3),
    asked=st.none() | st.floats(0, 5),
    timeout=st.none() | st.floats(0.1, 50),
)
@example(attempts=6, initial=0.0, multiplier=1.0, longest=0.0, asked=0.02, timeout=0.1)  # 0.1 - 0.08 > 0.02
def test_waits_stay_within_their_bounds(
    attempts: int, initial: float, multiplier: float, longest: float, asked: float | None, timeout: float | None
) -> None:
    now = 0.0
    policy = RetryPolicy(attempts, initial, longest, multiplier)
    tries = Attempts(policy, timeout, clock=lambda: now)
    for made in range(1, attempts + 1):
        try:
            wait = tries.wait_after(unavailable(asked))
        except UnavailableError:
            worst = now + ((asked or 0.0) + policy.longest_backoff(made))
            assert made == attempts or (timeout is not None and worst >= timeout)
            return
        assert (asked or 0.0) <= wait <= (asked or 0.0) + min(longest, initial * multiplier ** (made - 1))
        now += wait
        assert timeout is None or now < timeout
    pytest.fail("more attempts than the policy has")


def test_backoff_is_jittered() -> None:
    waits = {Attempts(RetryPolicy(initial_backoff=1), None).wait_after(unavailable()) for _ in range(50)}
    assert len(waits) == 50
    assert max(waits) - min(waits) > 0.5


def test_the_base_install_is_light() -> None:
    code = (
        "import sys, draftwood_client, draftwood_client.cli;"
        "heavy = {'numpy', 'torch', 'transformers', 'numba', 'redis', 'service', 'strategies', 'model_runner'};"
        "print(sorted(heavy & set(sys.modules)))"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "[]"


def test_what_is_exported_exists() -> None:
    assert draftwood_client.__all__ == sorted(draftwood_client.__all__, key=lambda name: (not name.isupper(), name))
    assert all(hasattr(draftwood_client, name) for name in draftwood_client.__all__)
