"""Runs SGLang without drafts, with its n-grams and with Draftwood's trees: `python gpu_smoke.py MODEL`.

For a machine with a GPU, SGLang 0.5.23 and draftwood-sglang. Each server answers the same prompts twice, greedy, so
that the second time its drafts know the answers; the texts are compared with those of the server without drafts. In
half precision a text may differ where two tokens are all but equally probable, whatever drafts: the share is printed
beside that of SGLang's own n-grams. Needs nothing but Python besides.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import NamedTuple

from ask import answer_to

SUBJECTS = ["a lamp", "two chairs", "a table", "a rug", "a bed", "a shelf", "a clock", "a mirror"]
QUESTIONS = [
    f"{question} {subject}?"
    for subject in SUBJECTS
    for question in ("How can I return", "What does it cost to send", "Can I still change an order of", "Who repairs")
]
DRAFTS = {
    "none": [],
    "ngram": ["--speculative-algorithm", "NGRAM"],
    "draftwood": ["--speculative-algorithm", "DRAFTWOOD"],
}
START_SECONDS = 900.0


class Answered(NamedTuple):
    """What a server wrote for all questions, and how fast."""

    texts: list[str]
    tokens: int
    steps: int
    seconds: float


@contextmanager
def serving(model: str, drafts: str, nodes: int, port: int, others: list[str]) -> Iterator[str]:
    """The address of a server that is ready."""
    given = [*DRAFTS[drafts], *(["--speculative-num-draft-tokens", str(nodes)] if DRAFTS[drafts] else [])]
    process = subprocess.Popen(["sglang", "serve", model, "--port", str(port), *given, *others])
    server, began = f"http://127.0.0.1:{port}", time.monotonic()
    try:
        while True:
            if process.poll() is not None or time.monotonic() - began > START_SECONDS:
                raise SystemExit(f"the server with {drafts} did not start")
            try:
                urllib.request.urlopen(f"{server}/health_generate", timeout=30).close()
                break
            except OSError:
                time.sleep(2.0)
        yield server
    finally:
        process.terminate()
        process.wait(60)


def answered(server: str, streams: int, tokens: int) -> Answered:
    """The answers to all questions, so many at a time."""
    began = time.perf_counter()
    with ThreadPoolExecutor(streams) as pool:
        told = list(pool.map(lambda question: answer_to(server, question, f"smoke-{streams}", tokens), QUESTIONS))
    seconds = time.perf_counter() - began
    infos = [one["meta_info"] for one in told]
    return Answered(
        [one["text"] for one in told],
        sum(info["completion_tokens"] for info in infos),
        sum(info.get("spec_verify_ct", info["completion_tokens"]) for info in infos),
        seconds,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--nodes", type=int, default=16)
    parser.add_argument("--streams", type=int, action="append")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--port", type=int, default=8731)
    parser.add_argument("rest", nargs="*", help="options of SGLang, behind --")
    given = parser.parse_args()
    plain: dict[int, list[str]] = {}
    for drafts in DRAFTS:
        with serving(given.model, drafts, given.nodes, given.port, given.rest) as server:
            for streams in given.streams or [1, 16]:
                first, second = (answered(server, streams, given.tokens) for _ in range(2))
                expected = plain.setdefault(streams, first.texts)
                equal = sum(a == b for one in (first, second) for a, b in zip(one.texts, expected, strict=True))
                for turn, one in (("first", first), ("again", second)):
                    print(
                        f"{drafts:10} {streams:3} streams, {turn}: {one.tokens / one.seconds:8.1f} tokens/s,"
                        f" {one.tokens / max(one.steps, 1):5.2f} a step"
                    )
                print(f"{drafts:10} {streams:3} streams: {equal} of {2 * len(expected)} texts are those without drafts")
                sys.stdout.flush()


if __name__ == "__main__":
    main()
