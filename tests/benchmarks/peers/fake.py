"""Peers for tests: small programs that speak the protocol, or break it."""

from __future__ import annotations

from collections.abc import Callable

UsePeer = Callable[[str], None]
"""Makes the program that of the peer "openvino-genai"."""

ANSWERS = """
import json, sys
for line in sys.stdin:
    request = json.loads(line)
    print(ANSWERS[request["op"]], flush=True)
"""


def answering(load: str = '{"version": "1"}', generate: str = "", load_test: str = "") -> str:
    """A program that answers each request by a fixed line."""
    answers = {"load": load, "generate": generate, "load_test": load_test}
    return f"ANSWERS = {answers!r}\n{ANSWERS}"


ECHO = """
import json, sys
for line in sys.stdin:
    request = json.loads(line)
    if request["op"] == "load":
        answer = {"version": "1"}
    elif request["op"] == "generate":
        answer = {"tokens": request["prompt"][: request["max_tokens"]], "seconds": 0.5}
    else:
        answer = {"tokens": len(request["prompts"]) * request["streams"], "seconds": request["seconds"]}
    print(json.dumps(answer), flush=True)
"""
"""Its answers are the first tokens of the prompts."""
