"""`draftwood bench auth`: what authentication costs a call, from its headers to its principal."""

from __future__ import annotations

import asyncio
import contextlib
import json
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from itertools import cycle, repeat
from pathlib import Path
from typing import Annotated, Any

import jwt
import typer
import yaml
from cryptography.hazmat.primitives.asymmetric import rsa
from jwt.algorithms import RSAAlgorithm
from rich.table import Table

from draftwood_benchmarks.shared.report import OutputOptions, console, percentile
from draftwood_client.cli.options import command
from draftwood_service.auth import Authenticator, Role, UnauthenticatedError
from draftwood_service.auth.api_keys import new_key
from draftwood_service.auth.auth_file import KeyEntry
from draftwood_service.rpc.access import Gate
from draftwood_service.settings import Settings

_OTHER_HEADERS = (("user-agent", "draftwood-python/0.1.0 grpc-python-asyncio/1.85.1"), ("x-trace", "0" * 32))
_ISSUER, _AUDIENCE, _NAME = "https://login.example", "draftwood", "spiffe://acme.example/billing"
_FIRST_TOKENS = 500


@dataclass(frozen=True, slots=True)
class Row:
    """Microseconds of the calls with one kind of credential."""

    credential: str
    median_us: float
    p99_us: float


class _Context:
    """Of a call, as far as the gate reads it."""

    def __init__(self, bearer: str | None, names: tuple[str, ...] = ()) -> None:
        authorization = () if bearer is None else (("authorization", f"Bearer {bearer}"),)
        self._metadata = (*_OTHER_HEADERS, *authorization)
        self._names = {"x509_subject_alternative_name": [name.encode() for name in names]} if names else {}

    def invocation_metadata(self) -> tuple[tuple[str, str], ...]:
        return self._metadata

    def auth_context(self) -> dict[str, list[bytes]]:
        return self._names


@command
def auth(
    output: OutputOptions,
    calls: Annotated[int, typer.Option(min=100, help="Calls with each kind of credential.")] = 20_000,
    keys: Annotated[int, typer.Option(min=1, help="API keys in the file.")] = 1000,
) -> None:
    """Microseconds from a call's headers to its principal, without gRPC's own work."""
    output.check()
    with tempfile.TemporaryDirectory(prefix="draftwood-") as folder:
        rows = asyncio.run(_measure(Path(folder), calls, keys))
    table = Table("credential", "median us", "p99 us", title=f"authentication of a call; {keys} API keys")
    for row in rows:
        table.add_row(row.credential, f"{row.median_us:.1f}", f"{row.p99_us:.1f}")
    console().print(table)
    output.write([asdict(row) for row in rows], lambda axes: _draw(axes, rows))


async def _measure(folder: Path, calls: int, keys: int) -> list[Row]:
    signing = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    made = [new_key() for _ in range(keys)]
    now = datetime.now(UTC)
    entries = [KeyEntry(id=key.id, tenant="acme", sha256=key.sha256, created=now) for key in made]
    in_file = {
        "keys": [entry.model_dump() for entry in entries],
        "certificates": [{"name": _NAME, "tenant": "acme"}],
    }
    file, jwks = folder / "auth.yaml", folder / "jwks.json"
    file.write_text(yaml.safe_dump(in_file))
    public = {**RSAAlgorithm.to_jwk(signing.public_key(), as_dict=True), "kid": "one"}
    jwks.write_text(json.dumps({"keys": [public]}))
    given = Settings(auth_file=file, jwt_jwks=str(jwks), jwt_issuer=_ISSUER, jwt_audience=_AUDIENCE)
    gate, nobody = Gate(Authenticator(given)), Gate(Authenticator(Settings()))

    def token(subject: int) -> str:
        claims = {"iss": _ISSUER, "aud": _AUDIENCE, "exp": time.time() + 3600, "sub": str(subject), "tenant": "acme"}
        return jwt.encode(claims, signing, "RS256", headers={"kid": "one"})

    valid = [_Context(key.key) for key in made]
    wrong = [_Context(new_key().key) for _ in made]
    first = [_Context(token(subject)) for subject in range(_FIRST_TOKENS)]
    cases: list[tuple[str, Gate, Iterable[_Context], int]] = [
        ("none (open)", nobody, repeat(_Context(None)), calls),
        ("API key", gate, cycle(valid), calls),
        ("API key, unknown", gate, cycle(wrong), calls),
        ("certificate", gate, repeat(_Context(None, ("localhost", _NAME))), calls),
        ("token, first call (RS256)", gate, first, _FIRST_TOKENS),
        ("token, later calls", gate, cycle(first), calls),
    ]
    return [await _time(*case) for case in cases]


async def _time(credential: str, gate: Gate, contexts: Iterable[_Context], calls: int) -> Row:
    clock: Callable[[], int] = time.perf_counter_ns
    taken: list[float] = []
    for context, _ in zip(contexts, range(calls), strict=False):
        begun = clock()
        with contextlib.suppress(UnauthenticatedError):
            await gate.admit(context, "Generate", Role.CALLER)  # type: ignore[arg-type]  # as far as it is read
        taken.append((clock() - begun) / 1000)
    return Row(credential, *(round(percentile(taken, share) or 0.0, 2) for share in (50, 99)))


def _draw(axes: Any, rows: list[Row]) -> None:
    names = [row.credential for row in rows]
    axes.barh(names, [row.median_us for row in rows])
    axes.invert_yaxis()
    axes.set_xlabel("microseconds a call, median")
