"""Invalid arguments are refused before anything is sent, and the message names them."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable
from typing import Any

import pytest

from draftwood_client import (
    NO_RETRY,
    AdminClient,
    ArgumentError,
    ArgumentTypeError,
    ArgumentValueError,
    AsyncAdminClient,
    AsyncClient,
    ChatMessage,
    Client,
    MemoryClient,
    RetryPolicy,
    TlsConfig,
    UnavailableError,
)
from tests.client.conftest import Connect
from tests.client.fake_server import FakeServer

USER = {"role": "user", "content": "x"}
DEEP: dict[str, Any] = functools.reduce(lambda inner, _: {"not": inner}, range(5000), {})
KEYS = "reasoning, tool_call_id, tool_calls, tool_name"
BAD_ARGUMENTS: list[tuple[str, Any, type[Exception], str]] = [
    ("prompt", None, TypeError, "prompt: must be text, token ids or chat messages, not None"),
    ("prompt", b"bytes", TypeError, "prompt: must be text, token ids or chat messages, not bytes"),
    ("prompt", USER, TypeError, "prompt: must be text, token ids or chat messages, not dict"),
    ("prompt", [], ValueError, "prompt: must hold at least one token id or chat message"),
    ("prompt", "a\ud800", ValueError, r"prompt: character 1 is the unpaired surrogate '\ud800', which is not text"),
    ("prompt[1]", [1, "2"], TypeError, "prompt[1]: must be an int, not str"),
    ("prompt[1]", [1, True], TypeError, "prompt[1]: must be an int, not bool"),
    ("prompt[1]", [1, -2], ValueError, "prompt[1]: -2 is not allowed; it must lie in [0, 2147483647]"),
    ("prompt[1]", [USER, 3], TypeError, "prompt[1]: must be a ChatMessage or a mapping, not int"),
    (
        "prompt[0]",
        [{"role": "user"}],
        ValueError,
        f"prompt[0]: needs the keys 'role' and 'content', may have {KEYS}; it has 'role'",
    ),
    ("prompt[0].content", [USER | {"content": 3}], TypeError, "prompt[0].content: must be a str, not int"),
    ("timeout", -1, ValueError, "timeout: -1 is not allowed; it must be above 0 seconds"),
    ("timeout", math.nan, ValueError, "timeout: nan is not allowed; it must be above 0 seconds"),
    ("timeout", "1", TypeError, "timeout: must be a number of seconds, not str"),
    ("max_token", 5, TypeError, "max_token: there is no such option; did you mean 'max_tokens'?"),
    ("max_tokens", 2**31, ValueError, "max_tokens: 2147483648 is not allowed; it must lie in"),
    ("max_tokens", 1.5, TypeError, "max_tokens: must be an int, not float"),
    ("seed", -1, ValueError, "seed: -1 is not allowed; it must lie in [0, 18446744073709551615]"),
    ("temperature", math.inf, ValueError, "temperature: inf is not allowed; it must be finite"),
    ("temperature", -(10**400), ValueError, "temperature: -inf is not allowed; it must be finite"),
    ("json_schema", DEEP, ValueError, "json_schema: is nested too deeply"),
    ("temperature", "hot", TypeError, "temperature: must be a number, not str"),
    ("drafting", 1, TypeError, "drafting: must be a bool, not int"),
    ("stop[1]", ["a", 3], TypeError, "stop[1]: must be a str, not int"),
    ("tenant", "\udfff", ValueError, "tenant: character 0 is the unpaired surrogate"),
]


@pytest.mark.parametrize(
    ("argument", "value", "kind", "message"), BAD_ARGUMENTS, ids=[message[:50] for *_, message in BAD_ARGUMENTS]
)
async def test_bad_arguments_of_a_request(
    connect: Connect, server: FakeServer, argument: str, value: Any, kind: type[Exception], message: str
) -> None:
    async with connect(server.target) as client:
        with pytest.raises(ArgumentError) as caught:
            await client.generate(**{"prompt": "x", argument.partition("[")[0]: value})
    assert isinstance(caught.value, kind)
    assert str(caught.value).startswith(message)
    assert caught.value.argument == argument
    assert server.requests == []


BAD_CONNECTIONS: list[tuple[Callable[[], object], str]] = [
    (lambda: Client(""), "target: is empty"),
    (lambda: TlsConfig(certificate_chain=b"x"), "tls.*given together"),
    (lambda: TlsConfig.from_files("/no.pem"), r"tls\.root_certificates: cannot read .*No such file"),
    (lambda: Client(api_key="a", token="b"), "token: cannot be combined with api_key"),
    (lambda: Client(api_key=""), "api_key: is empty, or has"),
    (lambda: Client(api_key="hush\n"), "api_key: is empty, or has"),
    (lambda: Client(api_key="hüsh"), "api_key: is empty, or has"),
    (lambda: Client(api_key="hush hush"), "api_key: is empty, or has"),
    (lambda: RetryPolicy(6), r"retry.max_attempts: 6 is not allowed; it must lie in \[0, 5\]$"),
    (lambda: RetryPolicy(initial_backoff=0.0), "retry.initial_backoff: 0.0 .* must be at least 0.01 seconds$"),
    (lambda: RetryPolicy(max_backoff=math.inf), "retry.max_backoff: inf .* must be at least 0.01 seconds$"),
    (lambda: RetryPolicy(multiplier=0.5), "retry.multiplier: 0.5 is not allowed; it must be at least 1$"),
]


@pytest.mark.parametrize(("make", "message"), BAD_CONNECTIONS)
def test_bad_arguments_of_a_connection(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ArgumentValueError, match=f"^{message}") as caught:
        make()
    assert not re.search("h[uü]sh", str(caught.value))


def test_arguments_of_a_connection_have_types() -> None:
    with pytest.raises(ArgumentTypeError, match="target: must be a str, not int"):
        AsyncClient(50051)  # type: ignore[arg-type]
    with pytest.raises(ArgumentTypeError, match="api_kye: there is no such argument"):
        AdminClient(api_kye="x")  # type: ignore[call-arg]


WITHOUT_PORT = "somehost 10.0.0.7 ::1 [::1] dns:///somehost dns: ipv4:10.0.0.7 ipv6:[::1]:1,[::1]"
WRONG_PORT = "somehost: somehost:0 somehost:65536 somehost:https somehost:50051/x"
URLS = "http://x:1 https://x grpc://x:1"


@pytest.mark.parametrize("target", f"{WITHOUT_PORT} {WRONG_PORT} {URLS}".split())
def test_a_target_names_its_port_and_is_no_url(target: str) -> None:
    problem = "is a URL; write it as host:port" if target in URLS else "has no valid port; write it as host:port, such"
    with pytest.raises(ArgumentValueError) as caught:
        Client(target)
    assert str(caught.value).startswith(f"target: '{target}' {problem}")


def test_secrets_stay_out_of_reprs() -> None:
    assert "hush" not in repr(TlsConfig(certificate_chain=b"public", private_key=b"hush"))
    for credential in ({"token": "hush"}, {"api_key": "hush"}, {"metadata": {"Authorization": "hush"}}):
        with Client("localhost:1", **credential) as client:
            assert "hush" not in repr(client) + repr(client._connection)


LOCAL = "localhost:1 127.0.0.1:1 [::1]:1 dns:///localhost:1 dns:localhost:1 unix:/run/x unix-abstract:x"
ELSEWHERE = ["example.org:1", "10.0.0.1:1", "[2001:db8::1]:1", "dns:///draftwood:1", "dns://10.0.0.1/localhost:1"]
ELSEWHERE += ["ipv4:127.0.0.1:1,10.0.0.1:1", "localhost.example.org:1", "xds:///localhost", "127.0.0.1.example.org:1"]


def test_a_credential_may_go_to_this_machine_in_clear_text() -> None:
    for target in (*LOCAL.split(), "ipv4:127.0.0.1:1", "ipv6:[::1]:1"):
        Client(target, api_key="k").close()
    for target in ("xds:///draftwood", "dns://10.0.0.1:53/x:1", "ipv6:%5B::1%5D:1"):  # other ways to write a target
        Client(target).close()
    with Client("localhost:1", token=lambda: "x\n") as client, pytest.raises(ArgumentValueError, match=r"^token: "):
        client.generate("x")


@pytest.mark.parametrize("target", ELSEWHERE)
def test_no_credential_leaves_this_machine_in_clear_text(target: str) -> None:
    for kind in (Client, AsyncClient, MemoryClient, AdminClient, AsyncAdminClient):
        with pytest.raises(ArgumentValueError, match=r"^api_key: would be sent to .* in clear text; use TLS"):
            kind(target, api_key="k")
    with pytest.raises(ArgumentValueError, match=r"^token: would"):
        Client(target, token=lambda: "t")
    with pytest.raises(ArgumentValueError, match=r"^metadata: would"):
        Client(target, metadata={"Authorization": "Bearer k"})
    Client(target, api_key="k", tls=True).close()
    Client(target, api_key="k", plaintext_credentials=True).close()
    Client(target, tenant="acme", metadata={"x-trace": "1"}).close()


def test_integers_of_other_libraries_are_token_ids(server: FakeServer) -> None:
    class Id:
        def __index__(self) -> int:
            return 7

    with Client(server.target) as client:
        client.generate((Id(), Id()))  # type: ignore[arg-type]
    assert server.requests[0].token_ids.ids == [7, 7]


QUICK = RetryPolicy(5, initial_backoff=0.01, max_backoff=0.01, multiplier=1e6)


@pytest.mark.parametrize(("policy", "attempts"), [(RetryPolicy(0), 1), (NO_RETRY, 1), (QUICK, 5)])
def test_grpc_makes_the_attempts_of_a_policy(server: FakeServer, policy: RetryPolicy, attempts: int) -> None:
    server.unavailable_calls = 10
    with Client(server.target, retry=policy) as client, pytest.raises(UnavailableError):
        client.model_info()
    assert len(server.metadata) == attempts


def test_chat_takes_messages_and_complete_takes_text(server: FakeServer) -> None:
    wrong: Any
    with Client(server.target) as client:
        for wrong, problem in (
            ([1], r"^messages\[0\]: must be a ChatMessage or a mapping, not int"),
            ([], "^messages: must hold at least one"),
            (3, "^messages: must be chat messages, or the text of one, not int"),
            ([{"role": "user"}], r"^messages\[0\]: needs the keys 'role' and 'content'"),
        ):
            with pytest.raises(ArgumentError, match=problem):
                client.stream_chat(wrong)
        for wrong in ([ChatMessage("user", "x")], [{"role": "user", "content": "x"}]):
            with pytest.raises(ArgumentTypeError, match=r"^prompt: must be text or token ids; `chat` answers messages"):
                client.stream_complete(wrong)
        client.chat("Why?")
        client.chat([{"role": "user", "content": "Why?"}])
        client.complete("Why?")
        client.complete([1, 2])
    first, second, third, fourth = server.requests
    assert first.chat == second.chat
    assert (first.chat.messages[0].role, third.text, [*fourth.token_ids.ids]) == ("user", "Why?", [1, 2])
