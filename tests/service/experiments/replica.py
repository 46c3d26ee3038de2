"""A server with a fake engine in a process of its own, to be killed: `python -m ... STORE`. Prints its address."""

from __future__ import annotations

import asyncio
import sys

from tests.service.fakes import serving


async def main(store: str) -> None:
    async with serving(store=store) as served:
        print(served.server.address, flush=True)
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
