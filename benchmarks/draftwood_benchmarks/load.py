"""`draftwood bench load`: throughput and latency of a real service with many clients at once, drafting on and off.

The service runs in a process of its own, the clients in this one. Drafting on and off alternate on the same service, so
that other load on the machine slows both alike. A peer is measured before and after them, in its own process and
without gRPC.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import islice
from typing import Annotated, Any, NamedTuple, cast

import typer
from rich.table import Table

from draftwood_benchmarks.closed_loop import Questions, Window, closed_loop, fitting
from draftwood_benchmarks.harness.models import (
    ChosenModel,
    EngineName,
    ModelOptions,
    choose_model,
    describe_served,
    server_on,
)
from draftwood_benchmarks.harness.prompts import SAMPLED, read_prompts
from draftwood_benchmarks.harness.report import (
    BenchmarkError,
    OtherLoad,
    OutputOptions,
    Rows,
    console,
    half_range,
    percentile,
    progress,
    table,
    warning,
)
from draftwood_benchmarks.harness.servers import server_process
from draftwood_benchmarks.peers.process import PLAIN, AskedOptions, Peer
from draftwood_client import AsyncClient, GenerateOptions, ModelInfo
from draftwood_client.cli.options import command
from draftwood_model_runner.errors import InvalidValueError

_ORDER = (None, False, True, True, False, None)
"""The windows of one concurrency: of all peers (None), and of ours without and with drafts; a steady drift of the
machine's speed cancels out."""
_FASTER = 2
"""Questions prepared for a window with drafting, relative to those answered without. Where drafting answers more, the
window ends early."""
_SPARE_SLOTS = 8
"""Request slots of the service beyond the number of clients, so that none is refused."""
_FIRST_SECONDS = 2.0
"""Of a peer's requests before those that are measured."""


class State(NamedTuple):
    """What a window was measured with.

    Attributes:
        engine: as in `--peer`, or "draftwood".
        drafts: as in `--peer-drafts`; of ours "draftwood" or "none".
        warm: its drafts knew answers to other prompts.
    """

    engine: str
    drafts: str
    warm: bool = True


_OFF, _ON = State("draftwood", PLAIN), State("draftwood", "draftwood")
Windows = dict[tuple[int, State], Window]
"""The joined windows of each concurrency and state."""


@dataclass(frozen=True)
class LoadOptions(AskedOptions):
    """The options of the command but those of the model."""

    concurrency: Annotated[str, typer.Option(metavar="N,N,...", help="Numbers of clients at once.")] = "1,8,32,64"
    duration: Annotated[
        float, typer.Option(min=1.0, help="Seconds at each concurrency, for drafting on and off each.")
    ] = 20.0
    engine: Annotated[EngineName, typer.Option(help="What the service runs on.")] = "draftwood"
    strategy: Annotated[
        str | None, typer.Option(help="Drafting strategy; the default of the service if unset.", show_default=False)
    ] = None
    warm: Annotated[int, typer.Option(min=0, help="Prompts, the last ones, that memories learn from first.")] = 60

    @property
    def levels(self) -> list[int]:
        """The concurrencies, ascending. Raises InvalidValueError."""
        numbers = [number.strip() for number in self.concurrency.split(",")]
        if not all(number.isascii() and number.isdigit() and 1 <= int(number) <= 4096 for number in numbers):
            problem = "it must be numbers from 1 to 4096, separated by commas"
            raise InvalidValueError("concurrency", self.concurrency, problem)
        return sorted(set(map(int, numbers)))

    def flags(self) -> list[str]:
        """Of the service. One whose engine rests would decode answers again, beside the peer that is measured."""
        clients = max(self.levels)
        flags = ["--max-running", str(clients), "--max-waiting", str(clients + _SPARE_SLOTS), "--audit-share", "0"]
        flags += ["--prefix-cache", "false"]  # nor have the peers one: prompts come again in each window
        return flags if self.strategy is None else [*flags, "--strategy", self.strategy]


@command
def load(model: ModelOptions, output: OutputOptions, options: LoadOptions) -> None:
    """Throughput and latency of a real service at several concurrencies, with drafting (warm memory) and without. Peers
    decode greedily all the same.

    Ends with status 1 if any request fails.
    """
    import uvloop

    _ = options.peers  # raises before anything is loaded
    texts, flags = read_prompts(options.prompts), options.flags()
    chosen = choose_model(model)
    with ExitStack() as stack:
        on_engine, process = server_on(options.engine, chosen)
        with console.status("Starting the service"):
            server = stack.enter_context(server_process(*on_engine, *flags, **process))
        other_load = OtherLoad()
        info, windows = uvloop.run(_measure(server.target, texts, options, chosen, stack))
        busy = other_load.share()
    rows, name = rows_of(windows), describe_served(chosen, info)
    title = f"{name}\n{info.default_strategy} after {options.warm} other prompts"
    title += f"{'; sampled' * options.sampled}{warning(busy)}"
    output.report(
        table_of(rows, title),
        rows,
        model=name,
        runs_on=info.abilities.engine,
        strategy=info.default_strategy,
        latency_unit="ms",
        vocabulary=info.vocab_size,
        sampled=options.sampled,
        busy=busy,
    )
    if errors := [result.error for window in windows.values() for result in window.results if result.error]:
        raise BenchmarkError(f"{len(errors)} requests failed; the first: {errors[0]}")


async def _measure(
    target: str, texts: list[str], options: LoadOptions, chosen: ChosenModel, stack: ExitStack
) -> tuple[ModelInfo, Windows]:
    """The model and what was measured; the processes of peers end with the stack."""
    import torch

    max_tokens, clients = options.max_tokens, max(options.levels)
    async with AsyncClient(target) as client:
        info = await client.model_info()
        prompts = await fitting(client, info, texts, max_tokens)
        ids = [list((await client.tokenize(prompt)).token_ids) for prompt in prompts]
    split = len(prompts) - options.warm
    if split < 1:
        raise BenchmarkError(f"{len(prompts)} prompts fit the model; {options.warm} to warm up leave none to measure")
    generation = cast(GenerateOptions, {"max_tokens": max_tokens, **(SAMPLED if options.sampled else {})})
    questions = Questions(target, prompts[:split], prompts[split:], generation)
    first = islice(questions.plain(), clients)  # slower: KV memory is written for the first time
    await closed_loop(target, clients, first, math.inf)
    threads = chosen.options.threads or torch.get_num_threads()
    running = options.running_peers(stack, chosen, info.dtype, info.device, threads=threads, streams=clients)
    peers = MeasuredPeers(running, ids[:split], ids[split:], max_tokens, options.duration / 2, clients)
    windows: Windows = {}
    for level, drafting in progress([(level, each) for level in options.levels for each in _ORDER], "windows"):
        if drafting is None:
            peers.measure(level, windows)
            continue
        if drafting:
            await questions.prepare(level + _FASTER * len(windows[level, _OFF].results))
        asked = questions.drafted() if drafting else questions.plain()
        window = await closed_loop(target, level, asked, options.duration / 2)
        _add(windows, level, _ON if drafting else _OFF, window)
    return info, windows


def _add(windows: Windows, level: int, state: State, window: Window) -> None:
    windows[level, state] = Window.joined([windows.get((level, state), Window()), window])


class MeasuredPeers:
    """Measures the processes of engines.

    Args:
        prompts: token ids of the measured ones.
        others: token ids of those that memories learn from.
        seconds: of a window.
        streams: requests at once, in any window, at most.
    """

    def __init__(
        self,
        peers: Sequence[Peer],
        prompts: Sequence[Sequence[int]],
        others: Sequence[Sequence[int]],
        max_tokens: int,
        seconds: float,
        streams: int,
    ) -> None:
        self._prompts, self._others = prompts, others
        self._max_tokens, self._seconds = max_tokens, seconds
        self._measured = 0
        self._states = list[tuple[Peer, State]]()
        for peer in peers:
            peer.load_test(prompts, max_tokens, streams, _FIRST_SECONDS, memory="first")  # first answers are slower
            # A peer without a memory has one state, as if it were warm.
            warm = [*[True] * bool(others), False] if peer.has_memory else [True]
            self._states += [(peer, State(peer.name, peer.drafts, each)) for each in warm]

    def measure(self, level: int, windows: Windows) -> None:
        """Adds a window of each state."""
        for peer, state in self._states:
            self._measured += 1
            memory = f"{self._measured}"  # a new one: no window knows the answers of an earlier one
            if state.warm:
                peer.learn(self._others, self._max_tokens, memory)
            window = peer.load_test(self._prompts, self._max_tokens, level, self._seconds, memory)
            _add(windows, level, state, window)


def rows_of(windows: Windows) -> Rows:
    """The rows of the report, by concurrency, those of peers first; "vs_peer" is relative to the fastest of them."""
    rows = []
    for level in sorted({level for level, _ in windows}):
        states = [state for at, state in windows if at == level]
        peers = sorted((state for state in states if state not in (_OFF, _ON)), reverse=True)
        fastest = max((windows[level, state] for state in peers), key=lambda window: window.tokens_per_s, default=None)
        ours = [state for state in (_OFF, _ON) if state in states]
        rows += [row_of(level, state, windows[level, state], fastest) for state in [*peers, *ours]]
    return rows


def row_of(concurrency: int, state: State, window: Window, peer: Window | None = None) -> dict[str, Any]:
    """A row of the report; latencies in milliseconds, null if no request has one. Requests of a peer, which has no
    service, do not fail.

    Args:
        peer: the fastest peer's window of the same concurrency; None if there is none.
    """
    rates, is_ours = window.rates or [0.0], state.engine == _ON.engine
    succeeded = [result for result in window.results if result.error is None]
    ttft = [1000 * result.ttft for result in succeeded if result.ttft is not None]
    tpot = [1000 * result.tpot for result in succeeded if result.tpot is not None]
    steps = sum(result.steps for result in succeeded) if is_ours else window.steps
    tokens = sum(result.tokens for result in succeeded) if is_ours else window.tokens
    return {
        **state._asdict(),
        "concurrency": concurrency,
        "drafting": state.drafts != PLAIN,
        "tokens_per_s": round(window.tokens_per_s, 2),
        "tokens_per_s_min": round(min(rates), 2),
        "tokens_per_s_max": round(max(rates), 2),
        "vs_peer": None if peer is None else _rounded(window.tokens_per_s / peer.tokens_per_s),
        "ttft_p50": _rounded(percentile(ttft, 50)),
        "ttft_p99": _rounded(percentile(ttft, 99)),
        "tpot_p50": _rounded(percentile(tpot, 50)),
        "tpot_p99": _rounded(percentile(tpot, 99)),
        "errors": len(window.results) - len(succeeded) if is_ours else None,
        "requests": len(window.results) if is_ours else len(window.results) or None,
        "seconds": round(window.seconds, 3),
        "acceptance_length": round(tokens / steps, 3) if steps else None,
    }


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 3)


def table_of(rows: Rows, title: str) -> Table:
    peer = any(row["vs_peer"] is not None for row in rows)
    plain = {r["concurrency"]: r["tokens_per_s"] for r in rows if r["engine"] == _OFF.engine and not r["drafting"]}

    def more(row: dict[str, Any]) -> dict[str, Any]:
        off = plain[row["concurrency"]]
        return {"name": _name(row), "spread": half_range(row), "x_off": row["tokens_per_s"] / off if off else None}

    columns = {"clients": "{concurrency}", "drafts": "{name}", "tok/s": "{tokens_per_s:.0f}", "+-": "{spread:.0%}"}
    columns |= {"x off": "{x_off:.2f}"} | ({"x peer": "{vs_peer:.2f}"} if peer else {})
    columns |= {"accept": "{acceptance_length:.2f}", "TTFT ms": "{ttft_p50:.0f} / {ttft_p99:.0f}"}
    columns |= {"TPOT ms": "{tpot_p50:.1f} / {tpot_p99:.1f}", "err": "{errors}"}
    caption = (
        "+-: half the range of the windows; x off: throughput against drafting off;"
        f"{' x peer: against the fastest peer;' if peer else ''} accept: acceptance length, tokens per step;"
        " TTFT, TPOT: time to the first token and for each later one, median / 99th percentile;"
        " err: requests that failed"
    )
    return table(title, [row | more(row) for row in rows], columns, caption=caption)


def _name(row: dict[str, Any]) -> str:
    if row["engine"] == _ON.engine:
        return "on" if row["drafting"] else "off"
    return f"{row['engine']}, {row['drafts']}{'' if row['warm'] else ' cold'}" if row["drafting"] else row["engine"]
