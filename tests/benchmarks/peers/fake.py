"""Peers for tests: small programs that speak the protocol, or break it."""

from __future__ import annotations

from collections.abc import Callable

UsePeer = Callable[[str], None]
"""Makes the program that of the peer "openvino-genai"."""

ANSWER_LOAD = """
import json, sys
request = json.loads(sys.stdin.readline())
print(json.dumps({"version": request["dtype"] + " " + request["weights"]}), flush=True)
"""
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
