"""Runs one attack in a process of its own: `python -m tests.security.abuse.attacker NAME TARGET SECONDS`.

Prints "ready" when its payload is made, begins when a line comes on standard input, and prints the statuses as JSON.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections import Counter

from tests.security.abuse.attack import Statuses
from tests.security.abuse.attacks import ATTACKS


def main(name: str, target: str, seconds: str) -> None:
    traffic = next(attack for attack in ATTACKS if attack.name == name).prepare()
    statuses = Statuses(Counter())
    print("ready", flush=True)
    sys.stdin.readline()
    asyncio.run(traffic(target, float(seconds), statuses))  # type: ignore[arg-type]
    print(json.dumps({"counts": statuses.counts, "untyped": statuses.untyped}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
