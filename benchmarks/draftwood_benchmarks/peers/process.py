"""A peer engine in a subprocess: one JSON object per line on its stdin, one line of JSON back on its stdout.

| request | answer |
|---|---|
| `{"op": "load", "model", "dtype", "weights", "threads", "folder", "streams", ...}` | `{"version"}` |
| `{"op": "generate", "prompt", "max_tokens"}` | `{"tokens", "seconds", "steps"}` |
| `{"op": "load_test", "prompts", "max_tokens", "streams", "seconds"}` | `{"tokens", "seconds", "steps", "requests"}` |
| `{"op": "learn", "prompts", "max_tokens", "memory"}` | `{"seconds"}` |
| `{"op": "replay", "recordings", ...}`, of programs that only draft | fields of `replay.Replayed` |

Further fields of `load` are those of `PeerModel`. `folder` is for converted weights; `prompt` and each of `prompts` are
token ids. "tokens" are the new token ids of `generate`, and the number of tokens written in the window of `load_test`;
"steps" how many forward passes wrote them, each sequence's counted, which a peer without drafts may leave out;
"requests", of those that got a token in the window, the seconds from sending to the first tokens, the seconds from
these to the last ones, how many came first, and how many in all; a peer may leave it out too. Where
`drafts` remember answers, each request names the `memory` that it drafts from and adds to. A request that fails is
answered by `{"error"}`. The peer ends when its stdin is closed.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from draftwood_benchmarks.closed_loop import RequestResult, Window
from draftwood_benchmarks.harness.prompts import PromptsOption, SampledOption
from draftwood_benchmarks.harness.report import BenchmarkError, console
from draftwood_model_runner.errors import InvalidInputError
from draftwood_model_runner.loading.sources import KNOWN_MODELS, fetch, gguf_file

if TYPE_CHECKING:
    from draftwood_benchmarks.harness.models import ChosenModel

ENVIRONMENTS = Path(".venv-peers")
"""Folder of an environment for each peer, which `make peers` installs, relative to the working directory."""
PLAIN = "none"
"""The name of no drafts, and of the strategy that makes none."""
DRAFTS: dict[str, tuple[str, ...]] = {
    "openvino-genai": (PLAIN, "prompt-lookup"),
    "vllm": (PLAIN, "ngram", "suffix", "draftwood"),
    "llama.cpp": (PLAIN, "ngram-simple", "ngram-map-k", "ngram-mod", "ngram-cache"),
}
"""What each peer can draft with here."""
DRAFTS_WITH_MEMORY = ("suffix", "draftwood", "ngram-mod", "ngram-cache")
"""Drafts that come from earlier answers as well."""
_BY_PEER = "; ".join(f"{name}: {', '.join(drafts)}" for name, drafts in DRAFTS.items())
MODULES = {"openvino-genai": "openvino_genai_peer", "vllm": "vllm_peer", "llama.cpp": "llama_cpp_peer"}
LOAD_TIMEOUT, ANSWER_TIMEOUT, _END_TIMEOUT = 900.0, 300.0, 10.0
"""Seconds to convert and load a model, for one answer, and to end."""
_LOG_LINES, _ERROR_LENGTH = 5, 500


@dataclass(frozen=True)
class AskedOptions:
    """What is asked, and which other engines are asked as well: the options that `speed` and `load` share."""

    prompts: PromptsOption = None
    sampled: SampledOption = False
    peer: Annotated[
        list[str] | None,
        typer.Option(
            metavar=f"[{'|'.join(DRAFTS)}]",
            help="Another engine to measure as well; may be given several times. `make peers` installs them.",
            show_default=False,
        ),
    ] = None
    peer_drafts: Annotated[
        list[str] | None,
        typer.Option(
            help=f"What peers draft with, each with those that it has; may be given several times. {_BY_PEER}. none by"
            " default.",
            show_default=False,
        ),
    ] = None
    peer_gguf: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="The GGUF file that llama.cpp computes, if --model does not name one.",
            show_default=False,
        ),
    ] = None
    max_tokens: Annotated[int, typer.Option(min=1, help="New tokens per answer, at most.")] = 200

    @property
    def peers(self) -> list[tuple[str, str]]:
        """Each peer with what it drafts with. Raises InvalidInputError."""
        return drafts_of(self.peer or [], self.peer_drafts or [])

    def running_peers(self, stack: ExitStack, chosen: ChosenModel, dtype: str, device: str, **model: Any) -> list[Peer]:
        """A process of each peer for each kind of drafts; they end with the stack.

        Args:
            model: further attributes of `PeerModel`.
        """
        weights, gguf = chosen.options.weights, self.peer_gguf or chosen.options.model
        peer_model = PeerModel(chosen.path, dtype, weights=weights, gguf=gguf, **model)
        return [
            stack.enter_context(running_peer(name, replace(peer_model, drafts=drafts), device))
            for name, drafts in self.peers
        ]


class PeerError(BenchmarkError):
    """A peer is not installed, or failed."""


@dataclass(frozen=True, slots=True)
class PeerModel:
    """The model as a peer loads it, without a prefix cache: its prompts repeat from window to window.

    Attributes:
        model: folder or hub id.
        dtype: of weights, activations and KV cache: "float32", "bfloat16" or "float16".
        weights: "int8" or "int4" where the peer quantizes its weights to 8 or 4 bits; otherwise they have the dtype.
            llama.cpp computes the weights of its file, whatever these are.
        streams: requests that decode in one batch, at most.
        drafts: one of `DRAFTS`.
        gguf: what names the file that llama.cpp computes, as `--model` does; None if nothing does.
    """

    model: str
    dtype: str
    threads: int
    streams: int = 1
    weights: str = "as-is"
    drafts: str = PLAIN
    gguf: str | None = None


class Answer(NamedTuple):
    """An answer to a prompt.

    Attributes:
        tokens: the new tokens.
        seconds: from the prompt's token ids to the last token, prefill included.
        steps: forward passes that wrote tokens, the prefill included.
        nodes: draft tokens verified in them; 0 of a peer, which does not tell.
    """

    tokens: list[int]
    seconds: float
    steps: int
    nodes: int = 0


class Peer:
    """A running peer.

    Attributes:
        name: as in `--peer`.
        drafts: as in `--peer-drafts`.
        version: of its package.
    """

    def __init__(self, name: str, process: subprocess.Popen[str], log: Path, drafts: str = PLAIN) -> None:
        self.name = name
        self.drafts = drafts
        self.version = ""
        self._process = process
        self._log = log

    @property
    def has_memory(self) -> bool:
        """Whether it drafts from earlier answers."""
        return self.drafts in DRAFTS_WITH_MEMORY

    def generate(self, prompt: Sequence[int], max_tokens: int, memory: str = "") -> Answer:
        """The greedy answer, and its seconds as the peer measured them. Raises PeerError."""
        request = {"op": "generate", "prompt": list(prompt), "max_tokens": max_tokens, **self._named(memory)}
        answer = self.ask(request, ANSWER_TIMEOUT)
        return Answer(answer["tokens"], answer["seconds"], answer.get("steps", len(answer["tokens"])))

    def load_test(
        self, prompts: Sequence[Sequence[int]], max_tokens: int, streams: int, seconds: float, memory: str = ""
    ) -> Window:
        """What `streams` concurrent requests got in a window. Raises PeerError."""
        request = {"op": "load_test", "prompts": [*map(list, prompts)], "max_tokens": max_tokens, "streams": streams}
        answer = self.ask(request | {"seconds": seconds} | self._named(memory), seconds + ANSWER_TIMEOUT)
        timed = [  # as if each had been sent at 0
            RequestResult(0.0, ttft, ttft + decode_seconds, first_tokens, tokens)
            for ttft, decode_seconds, first_tokens, tokens in answer.get("requests", ())
        ]
        return Window(answer["seconds"], answer["tokens"], timed, steps=answer.get("steps", answer["tokens"]))

    def learn(self, prompts: Sequence[Sequence[int]], max_tokens: int, memory: str) -> None:
        """Lets it answer prompts, for a memory. Raises PeerError."""
        if prompts and self.has_memory:
            texts = [*map(list, prompts)]
            self.ask({"op": "learn", "prompts": texts, "max_tokens": max_tokens, "memory": memory}, LOAD_TIMEOUT)

    def _named(self, memory: str) -> dict[str, str]:
        return {"memory": memory} if self.has_memory else {}

    def ask(self, request: dict[str, Any], timeout: float) -> dict[str, Any]:
        """Sends a request and returns its answer. Raises PeerError: it died, timed out, failed or sent no JSON."""
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        try:
            stdin.write(json.dumps(request) + "\n")
            stdin.flush()
        except OSError:
            raise self._died() from None
        if not select.select([stdout], [], [], timeout)[0]:
            raise PeerError(f"peer {self.name}: no answer to {request['op']} within {timeout:g} s")
        if not (line := stdout.readline()):
            raise self._died()
        answer = None
        with suppress(ValueError):
            answer = json.loads(line)
        if not isinstance(answer, dict):
            told = line.strip()[:100]
            raise PeerError(f"peer {self.name}: its answer to {request['op']} is no JSON object: {told!r}")
        if "error" in answer:
            raise PeerError(f"peer {self.name}: {request['op']} failed: {answer['error'][:_ERROR_LENGTH]}")
        return answer

    def _died(self) -> PeerError:
        try:
            status = f"ended with status {self._process.wait(_END_TIMEOUT)}"
        except subprocess.TimeoutExpired:
            status = "closed its output"
        log = self._log.read_text(encoding="utf-8", errors="replace").splitlines()[-_LOG_LINES:]
        return PeerError(f"peer {self.name}: {status}\n" + "\n".join(log))


def drafts_of(names: Sequence[str], drafts: Sequence[str]) -> list[tuple[str, str]]:
    """What is measured: each peer with those of the drafts that it has, or with none of them without.

    Raises:
        InvalidInputError: there is no such peer, or none of them has such drafts.
    """
    for name in names:
        if name not in DRAFTS:
            raise InvalidInputError("--peer", name, f"must be one of {', '.join(DRAFTS)}")
    offered = dict.fromkeys(kind for name in names for kind in DRAFTS[name]) or (PLAIN,)
    for kind in drafts:
        if kind not in offered:
            named = " ".join(f"--peer {name}" for name in names) or "no --peer"
            raise InvalidInputError("--peer-drafts", kind, f"must be one of {', '.join(offered)} with {named}")
    by_name = {name: [kind for kind in dict.fromkeys(drafts) if kind in DRAFTS[name]] for name in names}
    return [(name, kind) for name, kinds in by_name.items() for kind in kinds or [PLAIN]]


@contextmanager
def running_peer(name: str, model: PeerModel, device: str = "cpu", timeout: float = LOAD_TIMEOUT) -> Iterator[Peer]:
    """Runs a peer with the model loaded while the context lasts; its converted weights are deleted at the end.

    Raises:
        InvalidInputError: the benchmark runs on a `device` that peers don't, or llama.cpp has no GGUF file.
        ModelNotFoundError: its GGUF file is missing, or cannot be downloaded.
        PeerError: the peer is not installed, ended by itself, or could not load the model.
    """
    if not device.startswith("cpu"):
        raise InvalidInputError("--peer", name, f"peers run on the CPU, and the model on {device}")
    drafts = "" if model.drafts == PLAIN else f", drafts {model.drafts}"
    console.print(f"Converting and loading the model for {name}{drafts}")
    with TemporaryDirectory(prefix="draftwood-gguf-") as folder:
        if name == "llama.cpp":
            model = replace(model, gguf=str(_gguf_file(model.gguf, Path(folder))))
        with running_program(name, MODULES[name], timeout, **asdict(model)) as peer:
            yield peer


def _gguf_file(model: str | None, folder: Path) -> Path:
    """The GGUF file that a model is loaded from; one that we know by name is downloaded into the folder."""
    if model is not None and model in KNOWN_MODELS and not Path(model).exists():
        return fetch(KNOWN_MODELS[model], folder)
    file = None if model is None else gguf_file(Path(model))
    if file is None:
        problem = "it computes GGUF files; give one by --model or --peer-gguf"
        raise InvalidInputError("--peer", "llama.cpp", f"{problem}, or the name of one that `draftwood models` lists")
    return file


@contextmanager
def running_program(
    name: str, module: str, timeout: float = LOAD_TIMEOUT, drafts: str = PLAIN, **load: Any
) -> Iterator[Peer]:
    """Runs a module of this package by `serve_peer` in the environment of a peer. It imports nothing of ours.

    Args:
        load: further fields of its `load` request.

    Raises:
        PeerError: the peer is not installed, ended by itself, or could not load.
    """
    with TemporaryDirectory(prefix="draftwood-peer-") as folder, Path(folder, "log").open("wb") as log:
        process = subprocess.Popen(
            command_of(name, module),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            process_group=0,
        )
        try:
            peer = Peer(name, process, Path(log.name), drafts)
            request = {"op": "load", **load, "drafts": drafts, "folder": str(Path(folder, "model"))}
            peer.version = peer.ask(request, timeout)["version"]
            yield peer
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # with its own children; they hold nothing that must be saved
            with suppress(OSError):  # unsent input of a peer that died
                process.communicate()


def command_of(name: str, module: str) -> list[str]:
    """The command that starts a program. Raises PeerError if the peer is not installed."""
    python = ENVIRONMENTS / name / "bin" / "python"
    if not python.exists():
        raise PeerError(f"peer {name}: {python} is missing; run `make peers` in the repository")
    return [str(python), "-W", "ignore", str(Path(__file__).with_name("serve_peer.py")), module]
