"""Looks at a service while it is attacked."""

from __future__ import annotations

import asyncio
import json
import sys

from tests.security.abuse.attack import Attack, Statuses
from tests.security.abuse.gateway_probes import probe_gateway
from tests.security.abuse.probes import Seen, probe


async def look_during(target: str, attack: Attack, seconds: float) -> tuple[Seen, Statuses]:
    """What the probes saw while a process of its own attacked, and the attack's statuses."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "tests.security.abuse.attacker",
        attack.name,
        target,
        str(seconds),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
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
