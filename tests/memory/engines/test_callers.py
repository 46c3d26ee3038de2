"""What a caller decides of the drafts for its request: behind a proxy or the service, never whose memory it uses."""

from __future__ import annotations

import json
from typing import Any

import pytest

from draftwood_memory.engines.options import TENANT, TRUSTED, RequestOptions
from draftwood_memory.engines.policy import DecidedPolicy, SettingsPolicy
from draftwood_memory.engines.tenant_header import TenantHeader
from draftwood_memory.settings import MemorySettings
from draftwood_strategies.drafting import Drafting


class Server:
    """Records what comes through; answers 200."""

    def __init__(self) -> None:
        self.bodies: list[bytes] = []
        self.scopes: list[Any] = []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.scopes.append(scope)
        message = await receive()
        self.bodies.append(message["body"])
        assert not message["more_body"]
        await send({"type": "http.response.start", "status": 200, "headers": []})


async def post(body: bytes, *tenants: str, pieces: int = 1, kind: str = "http") -> tuple[Server, list[Any]]:
    server, sent = Server(), []
    size = -(-len(body) // pieces) or 1
    waiting = [body[at : at + size] for at in range(0, len(body), size)] or [b""]

    async def receive() -> Any:
        return {"type": "http.request", "body": waiting.pop(0), "more_body": bool(waiting)}

    async def send(message: Any) -> None:
        sent.append(message)

    headers = [(b"content-length", str(len(body)).encode()), *((b"X-Draftwood-Tenant", t.encode()) for t in tenants)]
    await TenantHeader(server)({"type": kind, "headers": headers, "path": "/v1/completions"}, receive, send)
    return server, sent


def tenants_in(value: Any) -> list[Any]:
    """All values of the key, at any depth."""
    if isinstance(value, dict):
        own = [inner for key, inner in value.items() if key == TENANT]
        return own + [one for inner in value.values() for one in tenants_in(inner)]
    return [one for inner in value for one in tenants_in(inner)] if isinstance(value, list) else []


@pytest.mark.parametrize(
    "body",
    [
        b'{"prompt": "x"}',
        b'{"prompt": "x", "vllm_xargs": {"draftwood_tenant": "victim", "draftwood_learn": 0}}',
        b'{"prompt": "x", "vllm_xargs": {"draftwood\\u005ftenant": "victim"}}',
        b'{"vllm_xargs": {"draftwood_tenant": "victim"}, "vllm_xargs": {"draftwood_tenant": "victim"}}',
        b'{"prompt": "x", "vllm_xargs": null, "extra_body": [{"vllm_xargs": {"draftwood_tenant": "victim"}}]}',
        b'{"sampling_params": {"extra_args": {"draftwood_tenant": "victim"}}, "token_ids": [1]}',
    ],
)
@pytest.mark.parametrize("tenants", [("acme",), ("\u00e4cme",), ()])
async def test_a_caller_cannot_choose_a_tenant(body: bytes, tenants: tuple[str, ...]) -> None:
    server, _ = await post(body, *tenants, pieces=3)
    content = json.loads(server.bodies[0])
    assert content["vllm_xargs"][TENANT] == "".join(tenants)
    assert set(tenants_in(content)) == {"".join(tenants)}
    if "sampling_params" in content:
        assert content["sampling_params"]["extra_args"][TENANT] == "".join(tenants)
    headers = server.scopes[0]["headers"]
    assert [value for name, value in headers if name == b"content-length"] == [str(len(server.bodies[0])).encode()]
    assert [value.decode() for name, value in headers if name == b"X-Draftwood-Tenant"] == [*tenants]


async def test_other_options_and_fields_stay() -> None:
    body = b'{"prompt": "x", "n": 2, "vllm_xargs": {"draftwood_tenant": "victim", "draftwood_learn": 0}}'
    server, _ = await post(body, "acme")
    expected = {"prompt": "x", "n": 2, "vllm_xargs": {"draftwood_learn": 0, TENANT: "acme"}}
    assert json.loads(server.bodies[0]) == expected


async def test_a_call_without_a_body_passes() -> None:
    server, _ = await post(b"", "acme")
    assert server.bodies == [b""]


@pytest.mark.parametrize(
    ("body", "tenants", "message"),
    [
        (b'--x\r\nContent-Disposition: form-data; name="vllm_xargs"', ["acme"], "must be JSON"),
        (b"{", ["acme"], "must be JSON"),
        (b"\xff", ["acme"], "must be JSON"),
        (b"{}", ["victim", "acme"], ""),  # of a proxy that adds its header to the caller's, instead of setting it
    ],
)
async def test_what_cannot_be_read_or_has_two_headers_is_refused(body: bytes, tenants: list[str], message: str) -> None:
    server, sent = await post(body, *tenants)
    assert server.bodies == []
    error = json.loads(sent[1]["body"])["error"]
    assert sent[0]["status"] == error["code"] == 415
    assert message in error["message"]


async def test_web_sockets_are_refused() -> None:
    server, sent = await post(b"{}", "acme", kind="websocket")
    assert server.bodies == []
    assert sent == [{"type": "websocket.close", "code": 1008}]


async def test_what_carries_no_request_passes() -> None:
    scope, passed = {"type": "lifespan"}, []

    async def app(*arguments: Any) -> None:
        passed.append(arguments)

    async def unused(*arguments: Any) -> Any:
        raise AssertionError("the middleware reads or answers itself")

    await TenantHeader(app)(scope, unused, unused)
    assert passed == [(scope, unused, unused)]


async def test_a_caller_who_goes_is_noticed_before_and_after_the_body() -> None:
    """Half a body reaches nobody; behind a whole one the server hears that the caller has gone."""
    heard: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        heard.extend([await receive(), await receive()])

    async def call(*messages: Any) -> None:
        waiting = [*messages]

        async def receive() -> Any:
            return waiting.pop(0)

        async def send(message: Any) -> None:
            raise AssertionError(message)

        await TenantHeader(app)({"type": "http", "headers": []}, receive, send)

    gone = {"type": "http.disconnect"}
    await call({"type": "http.request", "body": b'{"a"', "more_body": True}, gone)
    assert heard == []
    await call({"type": "http.request", "body": b"[]"}, gone)
    assert heard == [{"type": "http.request", "body": b"[]", "more_body": False}, gone]


CALLERS = {"draftwood_tenant": "victim", "draftwood_strategy": "trie", "draftwood_max_nodes": 8}
DECIDED = {
    "tenant": "acme",
    "drafting": ["trie", [["branch_length", 8]], 4],
    "learns": False,
    "overrides": {"max_tokens": 1000},
}


def test_in_an_engine_that_the_service_runs_a_caller_decides_nothing() -> None:
    policy = DecidedPolicy()
    found = policy.options_of("1", {**CALLERS, TRUSTED: DECIDED})
    assert (found.tenant, found.drafting.max_nodes, found.learns) == ("acme", 4, False)
    assert found.drafting.options == (("branch_length", 8),)
    assert found.overrides.max_tokens == 1000
    alone = policy.options_of("2", CALLERS)
    assert (alone.tenant, alone.drafting.max_nodes, alone.learns) == ("", 0, False)
    text = policy.options_of("3", {TRUSTED: '{"tenant": "victim"}'})  # as an API with texts alone could carry it
    assert (text.tenant, text.drafting.max_nodes) == ("", 0)


def test_in_any_other_engine_what_the_service_would_have_decided_counts_for_nothing() -> None:
    policy = SettingsPolicy(MemorySettings(strategy="trie"), "")
    found = policy.options_of("1", {TRUSTED: {**DECIDED, "tenant": "victim"}})
    assert (found.tenant, found.learns) == ("", False)


@pytest.mark.parametrize(
    ("usual", "given", "expected"),
    [
        ("trie", None, ("default", "trie", 16, True)),
        ("trie", {"draftwood_tenant": "acme"}, ("acme", "trie", 16, True)),
        ("trie", {"draftwood_tenant": ""}, ("", "trie", 16, False)),
        ("trie", {"draftwood_learn": "off"}, ("default", "trie", 16, False)),
        ("trie", {"draftwood_strategy": "hybrid"}, ("default", "hybrid", 16, True)),
        ("trie", {"draftwood_strategy": "none"}, ("default", "none", 0, True)),
        ("trie", {"draftwood_max_nodes": 4}, ("default", "trie", 4, True)),
        ("trie", {"draftwood_max_nodes": 99}, ("default", "trie", 16, True)),
        ("trie", {"draftwood": "off"}, ("default", "none", 0, True)),
        ("none", None, ("default", "none", 0, True)),
        ("none", {"draftwood_strategy": "trie"}, ("default", "trie", 16, True)),
    ],
)
def test_a_request_chooses_within_the_settings_of_the_process(
    usual: str, given: dict[str, Any] | None, expected: tuple[str, str, int, bool]
) -> None:
    policy = SettingsPolicy(MemorySettings(strategy=usual, max_draft_nodes=16), "default")
    tenant, strategy, max_nodes, learns = expected
    assert policy.options_of("1", given) == RequestOptions(tenant, Drafting(strategy, (), max_nodes), learns)
