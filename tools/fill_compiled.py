"""Fills the folder NUMBA_CACHE_DIR, or the cache beside the source, with the compiled functions of a service.

Part of the image's build: `draftwood serve --compiled-functions` starts with what this leaves. Tests start with it too.
"""

from __future__ import annotations

import tempfile

from draftwood_benchmarks.harness.servers import running_server
from draftwood_client import ChatMessage, Client
from draftwood_strategies import strategy_names

_PROMPT = [ChatMessage("user", "Where is my order? I ordered two lamps, and two lamps have not arrived.")]


def main() -> None:
    for runner in ("openvino", "torch"):
        with tempfile.TemporaryDirectory() as folder:
            store = ("--store", "embedded", "--store-folder", folder, "--model-cache", "false")
            with running_server("--device", "cpu", "--runner", runner, *store) as target, Client(target) as client:
                for strategy in strategy_names():
                    for _ in range(2):
                        client.generate(_PROMPT, strategy=strategy, max_tokens=48, tenant=strategy)
                client.generate(_PROMPT, temperature=0.8, top_p=0.9, seed=1, n=2, max_tokens=32, top_logprobs=2)
                client.generate("The number is ", regex="[0-9]{4}")


if __name__ == "__main__":
    main()
