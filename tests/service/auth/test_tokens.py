"""Tokens that are accepted, keys of the issuer that change, and URLs that do not answer."""

from __future__ import annotations

import asyncio
import json
import re
import ssl
import threading
import time
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from draftwood_model_runner.errors import InvalidInputError
from draftwood_service.auth import IssuerUnavailableError, Role, UnauthenticatedError
from draftwood_service.auth.tokens import JwksFile, JwksUrl, KeySet, TokenVerifier
from draftwood_service.settings.groups import AuthSettings
from tests.certificates import make_certificate
from tests.service.auth.issuer import (
    AUDIENCE,
    EC_KEY,
    ED_KEY,
    ISSUER,
    OTHER_RSA_KEY,
    RSA_KEY,
    public_keys,
    token,
    write_keys,
)
from tests.service.fakes import until

ALGORITHMS = ("RS256", "ES256", "EdDSA")


def rules(**changed: Any) -> AuthSettings:
    return AuthSettings(jwt_jwks="keys", jwt_issuer=ISSUER, jwt_audience=AUDIENCE, **changed)


@pytest.fixture
def source(tmp_path: Path) -> JwksFile:
    return JwksFile(write_keys(tmp_path / "jwks.json", public_keys()), ALGORITHMS)


@pytest.fixture
def verifier(source: JwksFile) -> TokenVerifier:
    return TokenVerifier(source, rules())


@pytest.mark.parametrize(
    ("key", "algorithm", "kid"), [(RSA_KEY, "RS256", "rsa"), (EC_KEY, "ES256", "ec"), (ED_KEY, "EdDSA", "ed")]
)
async def test_signatures(verifier: TokenVerifier, key: Any, algorithm: str, kid: str) -> None:
    principal = await verifier.principal(token(key, algorithm, kid), time.time())
    assert (principal.name, principal.role, principal.tenant) == ("token:ann", Role.CALLER, "acme")


async def test_roles_and_claims_by_other_names(source: JwksFile) -> None:
    verifier = TokenVerifier(source, rules(jwt_tenant_claim="https://x/org", jwt_role_claim="roles"))
    for roles, role in (
        (None, Role.CALLER),
        ("tenant-admin", Role.TENANT_ADMIN),
        (["offline", "operator", "caller"], Role.OPERATOR),
        (["offline"], Role.CALLER),
        ({"operator": 1}, Role.CALLER),
        (3, Role.CALLER),
    ):
        found = await verifier.principal(token(roles=roles, **{"https://x/org": "beta"}), time.time())
        assert (found.role, found.tenant) == (role, "beta")
    assert (await verifier.principal(token(roles="operator"), time.time())).tenant is None


async def test_a_token_is_remembered_until_it_expires_or_too_many_follow(
    source: JwksFile, verifier: TokenVerifier, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = int(time.time())
    one = token(exp=now + 600)
    first = await verifier.principal(one, now)
    assert await verifier.principal(one, now + 629.9) is first  # the leeway is 30 s
    assert await verifier.principal(one, now + 630.0) is not first
    late = token(exp=now - 20)
    assert await verifier.principal(late, now)
    with pytest.raises(UnauthenticatedError):
        await TokenVerifier(source, rules(jwt_leeway=0)).principal(late, now)
    monkeypatch.setattr("draftwood_service.auth.tokens._MAX_VERIFIED", 2)
    used, unused = await verifier.principal(one, now), await verifier.principal(late, now)
    assert await verifier.principal(one, now) is used
    await verifier.principal(token(sub="another"), now)
    assert await verifier.principal(one, now) is used
    assert await verifier.principal(late, now) is not unused


async def test_a_token_that_is_too_long_is_refused_before_it_is_read(verifier: TokenVerifier) -> None:
    assert await verifier.principal(token(more="x" * 5000), time.time())
    with pytest.raises(UnauthenticatedError) as refused:
        await verifier.principal(token(more="x" * 8192), time.time())
    assert refused.value.cause == "token too long"


def key_set(*keys: Any) -> KeySet:
    return KeySet(json.dumps({"keys": keys}).encode(), (*ALGORITHMS, "HS256"))


def test_a_token_without_a_key_id_needs_a_set_with_one_key() -> None:
    rsa, ec = public_keys("rsa", "ec")
    without_id = {name: value for name, value in rsa.items() if name != "kid"}
    for only in (key_set(without_id), key_set(rsa)):
        assert only.find(None, "RS256")
        assert not only.find(None, "ES256")
        assert not only.find("other", "RS256")
    assert key_set(without_id, ec).find(None, "RS256")
    assert not key_set(rsa, ec).find(None, "RS256")


def test_sets_without_a_usable_key_are_refused(tmp_path: Path) -> None:
    [rsa] = public_keys("rsa")
    for bad in ({**rsa, "use": "enc"}, {**rsa, "alg": "RS512"}, {**rsa, "n": "!"}, "x", {**rsa, "kid": 3}):
        with pytest.raises(InvalidInputError, match=r"^jwt_jwks: has no key for signatures by RS256, ES256, EdDSA"):
            key_set(bad)
        assert key_set(*[bad] * 99, rsa).find("rsa", "RS256")
    for bad_set in (b"", b"[]", b'{"keys": 1}', b"[" * 100_000, json.dumps({"keys": [rsa] * 101}).encode()):
        with pytest.raises(InvalidInputError, match=r'^jwt_jwks: must be a JSON object with "keys"'):
            KeySet(bad_set, ALGORITHMS)
    with pytest.raises(InvalidInputError, match=r"^jwt_jwks .*missing: "):
        JwksFile(tmp_path / "missing", ALGORITHMS)


@pytest.mark.parametrize(
    "purpose",
    [
        {"use": "enc"},
        {"key_ops": ["encrypt", "wrapKey"]},
        {"key_ops": "verify"},
        {"alg": "RSA-OAEP"},
        {"kty": "oct", "k": "c2VjcmV0"},
    ],
    ids=str,
)
def test_only_keys_that_sign_count(purpose: dict[str, Any]) -> None:
    [rsa] = public_keys("rsa")
    other = {**rsa, "kid": "other", **purpose}
    for keys in ([rsa, other], [other, rsa]):
        found = key_set(*keys)
        assert found.find(None, "RS256") is found.find("rsa", "RS256") is not None
        assert found.find("other", "RS256") is found.find("other", "HS256") is None


class Web:
    """An https server of keys.

    Attributes:
        body: what it sends; None for a redirect to itself.
        asked: how often.
        sends: until it is set, spaces are sent, one by one, or nothing.
        drips: whether spaces are sent.
        in_headers: whether they are sent before the end of the headers.
    """

    def __init__(self, folder: Path) -> None:
        self.body: bytes | None = write_keys(folder / "keys", public_keys("rsa")).read_bytes()
        self.asked = 0
        self.sends = threading.Event()
        self.sends.set()
        self.drips = True
        self.in_headers = False
        web = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                web.asked += 1
                self.send_response(302 if web.body is None else 200)
                self.send_header("Location", "/")
                with suppress(OSError):  # the client has ended it
                    if web.in_headers:
                        self.flush_headers()
                        self.drip()
                    self.end_headers()
                    self.drip()
                    self.wfile.write(web.body or b"")

            def drip(self) -> None:
                while not web.sends.wait(0.02):
                    self.wfile.write(b" " * web.drips)

            def log_message(self, *_: Any) -> None: ...

        self.certificate, key = make_certificate(folder, "web")
        self.server = HTTPServer(("127.0.0.1", 0), Handler)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(self.certificate, key)
        self.server.socket = context.wrap_socket(self.server.socket, server_side=True)
        self.url = f"https://localhost:{self.server.server_port}/jwks"


@pytest.fixture
def web(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Web]:
    for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    made = Web(tmp_path)
    monkeypatch.setenv("SSL_CERT_FILE", str(made.certificate))
    thread = threading.Thread(target=made.server.serve_forever, args=(0.01,))
    thread.start()
    yield made
    made.sends.set()
    made.server.shutdown()
    thread.join()
    made.server.server_close()


async def test_unknown_key_ids_make_one_request_in_a_while_by_which_a_new_key_is_found(
    web: Web, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    verifier = TokenVerifier(JwksUrl(web.url, ALGORITHMS), rules())
    assert await verifier.principal(token(), time.time())  # the first request of all
    for _ in range(20):
        with pytest.raises(UnauthenticatedError):
            await verifier.principal(token(OTHER_RSA_KEY, kid="new"), time.time())
    assert web.asked == 1
    monkeypatch.setattr("draftwood_service.auth.tokens._RETRY_SECONDS", 0.0)
    web.body = write_keys(tmp_path / "keys", public_keys("rsa", "ec")).read_bytes().ljust(2**20)
    calls = [verifier.principal(token(EC_KEY, "ES256", "ec", sub=str(i)), time.time()) for i in range(20)]
    assert {one.tenant for one in await asyncio.gather(*calls)} == {"acme"}
    assert web.asked == 2  # for all of them together
    web.body = b"nonsense"  # the keys before stay in use
    with pytest.raises(UnauthenticatedError):
        await verifier.principal(token(kid="unknown"), time.time())
    assert await verifier.principal(token(), time.time())


LONG = json.dumps({"keys": public_keys("rsa")}).encode().ljust(2**20 + 1)


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        ("not vouched for", ".*certificate verify failed"),
        (None, "HTTP Error 302"),
        (LONG, "jwt_jwks https://localhost:.*/jwks: sends more than 1048576 bytes"),
        (b"{}", "jwt_jwks: must be a JSON object"),
    ],
    ids=["not vouched for", "redirect", "too long", "no keys"],
)
async def test_without_keys_a_call_may_be_repeated(
    web: Web, body: bytes | str | None, problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if isinstance(body, str):
        monkeypatch.delenv("SSL_CERT_FILE")
    else:
        web.body = body
    said = "^tokens cannot be verified at the moment; try again later$"
    with capture_logs() as logs, pytest.raises(IssuerUnavailableError, match=said):
        await TokenVerifier(JwksUrl(web.url, ALGORITHMS), rules()).principal(token(), time.time())
    assert web.asked == (not isinstance(body, str))
    assert [log["event"] for log in logs] == ["keys of the issuer cannot be read"]
    assert re.match(problem, logs[0]["problem"])


@pytest.mark.parametrize("sends", ["nothing", "spaces in its headers", "spaces in its body"])
async def test_an_answer_that_drips_is_ended(web: Web, monkeypatch: pytest.MonkeyPatch, sends: str) -> None:
    """No call waits for it beyond the time limit, and the issuer is asked again until its keys have come."""
    for name, seconds in (("_TIMEOUT_SECONDS", 0.3), ("_RETRY_SECONDS", 0.01), ("_REFRESH_SECONDS", 3600.0)):
        monkeypatch.setattr(f"draftwood_service.auth.tokens.{name}", seconds)
    web.drips, web.in_headers = sends != "nothing", sends == "spaces in its headers"
    web.sends.clear()
    source = JwksUrl(web.url, ALGORITHMS)
    verifier = TokenVerifier(source, rules())
    with capture_logs() as logs:
        async with asyncio.timeout(20):
            with pytest.raises(IssuerUnavailableError):
                await verifier.principal(token(), time.time())
        async with followed(source):
            await until(lambda: bool(logs))
            web.sends.set()
            await until(lambda: source.keys is not None)
    assert logs[0]["problem"] == "timed out: no complete answer within 0.3 s"
    assert await verifier.principal(token(), time.time())


async def test_keys_are_read_though_all_threads_of_asyncio_are_busy(web: Web) -> None:
    free = threading.Event()
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
    busy = asyncio.create_task(asyncio.to_thread(free.wait))
    source = JwksUrl(web.url, ALGORITHMS)
    try:
        await source.refresh()
        assert source.keys is not None
    finally:
        free.set()
        await busy


@asynccontextmanager
async def followed(source: JwksUrl) -> AsyncIterator[None]:
    following = asyncio.create_task(source.follow())
    try:
        yield
    finally:
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)


async def test_keys_are_followed_and_expire(web: Web, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, seconds in (("_REFRESH_SECONDS", 3600.0), ("_RETRY_SECONDS", 0.0), ("_STALE_SECONDS", 60.0)):
        monkeypatch.setattr(f"draftwood_service.auth.tokens.{name}", seconds)
    source = JwksUrl(web.url, ALGORITHMS)
    good, web.body = web.body, b"{}"
    with capture_logs() as logs:
        async with followed(source):
            await until(lambda: web.asked >= 3)
            web.body = good
            await until(lambda: source.keys is not None)
            asked, keys = web.asked, source.keys
            await asyncio.sleep(0.1)
            assert web.asked == asked  # not again for an hour
        web.body = b"[]"
        async with followed(source):
            await until(lambda: web.asked >= asked + 3)  # soon, though there are keys
        web.body = good
    bad, read = "keys of the issuer cannot be read", "keys of the issuer read"
    assert [log["event"] for log in logs] == [bad, read, bad]
    monkeypatch.setattr("draftwood_service.auth.tokens._REFRESH_SECONDS", 0.01)
    asked = web.asked
    async with followed(source):
        await until(lambda: web.asked >= asked + 3)
        assert source.keys is keys  # by which verified tokens are remembered
        web.body = write_keys(tmp_path / "keys", public_keys()).read_bytes()
        await until(lambda: source.keys is not keys)
        assert await TokenVerifier(source, rules()).principal(token(EC_KEY, "ES256", "ec"), time.time())
    monkeypatch.setattr("draftwood_service.auth.tokens._STALE_SECONDS", 0.0)
    assert source.keys is None
