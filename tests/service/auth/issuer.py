"""An issuer of tokens, its public keys as a file, and forged tokens."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import time
from pathlib import Path
from typing import Any

import jwt
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from jwt.algorithms import ECAlgorithm, OKPAlgorithm, RSAAlgorithm

ISSUER, AUDIENCE = "https://login.example", "draftwood"
SETTINGS: dict[str, Any] = {"jwt_issuer": ISSUER, "jwt_audience": AUDIENCE}

RSA_KEY = rsa.generate_private_key(public_exponent=65537, key_size=2048)
OTHER_RSA_KEY = rsa.generate_private_key(public_exponent=65537, key_size=2048)
EC_KEY = ec.generate_private_key(ec.SECP256R1())
ED_KEY = ed25519.Ed25519PrivateKey.generate()


def public_keys(*key_ids: str) -> list[dict[str, Any]]:
    """The public keys "rsa", "ec" and "ed", or some of them."""
    keys = {
        "rsa": RSAAlgorithm.to_jwk(RSA_KEY.public_key(), as_dict=True),
        "ec": ECAlgorithm.to_jwk(EC_KEY.public_key(), as_dict=True),
        "ed": OKPAlgorithm.to_jwk(ED_KEY.public_key(), as_dict=True),
    }
    return [{**keys[key_id], "kid": key_id} for key_id in key_ids or keys]


def write_keys(path: Path, keys: list[dict[str, Any]]) -> Path:
    """A JWKS file, written in one step."""
    part = path.with_name("part")
    part.write_text(json.dumps({"keys": keys}))
    part.replace(path)
    return path


def claims(**changed: Any) -> dict[str, Any]:
    """Those of a caller of the tenant acme, with changes; None leaves a claim out."""
    whole = {"iss": ISSUER, "aud": AUDIENCE, "exp": int(time.time()) + 600, "sub": "ann", "tenant": "acme", **changed}
    return {name: value for name, value in whole.items() if value is not None}


def token(key: Any = RSA_KEY, algorithm: str = "RS256", kid: str | None = "rsa", **changed: Any) -> str:
    """A signed token of `claims`."""
    return jwt.encode(claims(**changed), key, algorithm, headers=None if kid is None else {"kid": kid})


def forged_tokens() -> dict[str, str]:
    """Tokens that no server may accept, by what is wrong with them."""
    pem = RSA_KEY.public_key().public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
    now = int(time.time())
    own_key = RSAAlgorithm.to_jwk(OTHER_RSA_KEY.public_key(), as_dict=True)
    good = token()
    return {
        "no signature": _hand_made({"alg": "none", "kid": "rsa"}, claims(), None),
        "HMAC with the public key": _hand_made({"alg": "HS256", "kid": "rsa"}, claims(), pem),
        "an extension": jwt.encode(claims(), RSA_KEY, "RS256", headers={"kid": "rsa", "crit": ["x"], "x": 1}),
        "its own key": jwt.encode(claims(), OTHER_RSA_KEY, "RS256", headers={"jwk": own_key, "kid": "rsa"}),
        "another key": token(OTHER_RSA_KEY),
        "a key of another kind": token(EC_KEY, "ES256", kid="rsa"),
        "an algorithm that is not allowed": token(algorithm="RS512"),
        "an unknown key id": token(kid="unknown"),
        "no key id": token(kid=None),
        "another issuer": token(iss="https://evil.example"),
        "no issuer": token(iss=None),
        "another audience": token(aud="another service"),
        "no audience": token(aud=None),
        "expired": token(exp=now - 3600),
        "no expiry": token(exp=None),
        "an infinite expiry": token(exp=float("inf")),
        "an expiry that is no number": token(exp="soon"),
        "an expiry beyond floats": token(exp=10**400),
        "not yet valid": token(nbf=now + 3600),
        "no tenant": token(tenant=None),
        "an empty tenant": token(tenant=""),
        "a tenant of two lines": token(tenant="a\nb"),
        "a list of tenants": token(tenant=["acme", "other"]),
        "changed claims": ".".join([good.split(".")[0], _part(claims(tenant="other")), good.split(".")[2]]),
        "deep": "[" * 5000 + "." + "[" * 100 + ".x",
        "deep header": _encoded(b"[" * 4000) + ".e30.x",
    }


def _hand_made(header: dict[str, Any], payload: dict[str, Any], secret: bytes | None) -> str:
    signed = f"{_part(header)}.{_part(payload)}"
    signature = b"" if secret is None else hmac.new(secret, signed.encode(), hashlib.sha256).digest()
    return f"{signed}.{_encoded(signature)}"


def _part(content: dict[str, Any]) -> str:
    return _encoded(json.dumps(content).encode())


def _encoded(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()
