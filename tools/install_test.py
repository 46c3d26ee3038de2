"""Asks an installed Draftwood the same question twice: the second answer must be the first, in fewer steps.

`make install-test` runs it by the interpreter of an environment that pip made from the repository, in another folder.
"""

from __future__ import annotations

from draftwood_benchmarks.harness.servers import running_server
from draftwood_client import ChatMessage, Client

QUESTION = [ChatMessage("user", "Where is my parcel?")]


def main() -> None:
    with running_server() as target, Client(target) as client:
        first, second = (client.generate(QUESTION, max_tokens=100) for _ in range(2))
    assert first.text == second.text
    assert second.drafting.mean_acceptance_length > 2 * first.drafting.mean_acceptance_length
    print(f"tokens a step: {first.drafting.mean_acceptance_length:.2f}, {second.drafting.mean_acceptance_length:.2f}")


if __name__ == "__main__":
    main()
