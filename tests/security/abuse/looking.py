"""Looks at a service while it is attacked.

The attack runs in a process of its own: `python -m tests.security.abuse.looking NAME TARGET SECONDS`. It prints "ready"
when its payload is made, begins when a line comes on standard input, and prints the statuses as JSON.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections import Counter

from tests.security.abuse.attacks import ATTACKS, Attack, Statuses
from tests.security.abuse.probes import Seen, probe, probe_gateway


async def look_during(target: str, attack: Attack, seconds: float) -> tuple[Seen, Statuses]:
    """What the probes saw while a process of its own attacked, and the attack's statuses."""
    command = [sys.executable, "-m", __name__, attack.name, target, str(seconds)]
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe)
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        await process.stdout.readline()
        process.stdin.write(b"\n")
        seen = await (probe_gateway if attack.gateway else probe)(target, seconds)
        answer, _ = await asyncio.wait_for(process.communicate(), 60.0)
    finally:
        if process.returncode is None:
            process.kill()
    if process.returncode:
        raise ChildProcessError(f"attack {attack.name} ended with status {process.returncode}")
    return seen, Statuses(**json.loads(answer))


def attack_it(name: str, target: str, seconds: str) -> None:
    traffic = next(attack for attack in ATTACKS if attack.name == name).prepare()
    statuses = Statuses(Counter())
    print("ready", flush=True)
    sys.stdin.readline()
    asyncio.run(traffic(target, float(seconds), statuses))  # type: ignore[arg-type]
    print(json.dumps({"counts": statuses.counts, "untyped": statuses.untyped}), flush=True)


if __name__ == "__main__":
    attack_it(*sys.argv[1:])
