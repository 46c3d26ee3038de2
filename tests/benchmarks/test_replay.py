"""`draftwood bench replay` and `memory`, and what they replay."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest

from draftwood_benchmarks.commands import bench
from draftwood_benchmarks.peers import process
from draftwood_benchmarks.peers.sglang_replay import _accepted
from draftwood_benchmarks.replay import Recording, TraceError, accepted_length, read_trace, replay
from draftwood_benchmarks.replay.command import row_of, synthetic
from draftwood_model_runner.errors import DraftwoodError
from draftwood_strategies import DraftTree, Feedback, NoDrafts, TrieStrategy
from draftwood_strategies.arrays import Int32Array
from tests.benchmarks.conftest import ReportOf, write_trace


def recording(prompt: list[int], output: list[int]) -> Recording:
    return np.array(prompt, np.int32), np.array(output, np.int32)


class Counting:
    """Drafts a chain of the next integers, and records its observations."""

    top_k = 0

    def __init__(self) -> None:
        self.observed: list[list[int]] = []
        self.closed = 0

    def start(self, prompt: Int32Array) -> Counting:
        return self

    def propose(self, budget: int) -> DraftTree:
        return DraftTree.of(np.arange(1, 1 + budget) + self.observed[-1][-1])

    def observe(self, accepted: Int32Array, feedback: Feedback | None) -> None:
        self.observed.append(accepted.tolist())

    def close(self) -> None:
        self.closed += 1


def test_the_accepted_length_is_the_longest_path_that_the_output_follows() -> None:
    tree = DraftTree.of([5, 6, 7, 8, 9], [-1, -1, 1, 1, 3], [0.9, 0.8, 0.7, 0.6, 0.5])
    for continuation, length in (([6, 8, 9, 1], 3), ([6, 8], 2), ([5, 7], 1), ([4], 0), ([], 0)):
        assert accepted_length(tree, np.array(continuation, np.int32)) == length
    mask = np.array([[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [1, 1, 1, 0, 0], [1, 0, 0, 1, 0], [1, 0, 0, 1, 1]])
    for continuation, length in (([3, 4, 5], 2), ([1, 2], 2), ([2, 1], 0)):  # of SGLang's own trees
        assert _accepted([9, 1, 2, 3, 4], mask, continuation) == length


def test_a_replay_counts_steps_as_the_engine_would() -> None:
    """The first token is that of the prefill; a step writes the accepted tokens and one more, up to the end."""
    strategy = Counting()
    result = replay(strategy, [recording([1], [3, 4, 5, 6, 90, 91, 92])], budget=2)
    assert strategy.observed == [[3], [4, 5, 6], [90], [91, 92]]
    assert (result.steps, result.tokens, result.drafted, result.acceptance_length) == (3, 6, 6, 2.0)
    assert strategy.closed == 1


def test_without_drafts_every_step_writes_one_token() -> None:
    result = replay(NoDrafts(), [recording([1, 2], [3, 4, 5]), recording([1], [9])], budget=8)
    assert (result.steps, result.tokens, result.acceptance_length, result.bytes_per_token) == (2, 2, 1.0, 0.0)
    assert replay(NoDrafts(), [], budget=8).acceptance_length == 1.0


def test_memory_grows_over_the_recordings() -> None:
    output, strategy = list(range(100, 150)), TrieStrategy()
    assert replay(strategy, [recording([1, 2], output)], budget=16).acceptance_length == 1.0
    assert replay(strategy, [recording([1, 3], output)], budget=16).acceptance_length > 8.0
    assert strategy.tokens == 100


@pytest.mark.parametrize("name", ["t.jsonl", "t.jsonl.gz"])
def test_traces_are_read_up_to_the_limit(tmp_path: Path, name: str) -> None:
    path = write_trace(tmp_path / name, rows=5)
    assert len(list(read_trace(path))) == 5
    _, (prompt, output) = read_trace(path, limit=2)
    assert prompt.tolist() == [1, 3]
    assert output.dtype == np.int32


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 1: not JSON"),
        ('{"prompt_ids": [1]}', "output_ids"),
        ('{"prompt_ids": [1], "output_ids": []}', "output_ids must be a list"),
        ('{"prompt_ids": [-1], "output_ids": [1]}', "prompt_ids must be a list"),
        ('{"prompt_ids": ["a"], "output_ids": [1]}', "prompt_ids must be a list"),
        ('{"prompt_ids": [1], "output_ids": [99999999999]}', "output_ids must be a list"),
        ("[1, 2]", "not an object"),
        ('{"draftwood_memory": 1}\n{"kind": "output"}', "line 2: token_ids must be a list"),
        ('{"draftwood_memory": 1}\n{"kind": "corpus", "token_ids": [1, 2]}', "no answer of two tokens"),
    ],
)
def test_a_bad_trace_names_file_and_line(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text(line)
    with pytest.raises(TraceError, match=rf"bad\.jsonl.*{message}"):
        list(read_trace(path))
    for name in ("absent.jsonl", "no.gz"):
        (tmp_path / "no.gz").write_text("plain")
        with pytest.raises(TraceError, match=name):
            list(read_trace(tmp_path / name))


def test_an_exported_memory_is_a_trace_of_its_answers(tmp_path: Path) -> None:
    path = tmp_path / "memory.jsonl"
    records = [("output", [5, 6, 7]), ("corpus", [1, 2]), ("output", [9]), ("output", [8, 9])]
    lines = [{"draftwood_memory": 1, "model": "m"}, *({"kind": kind, "token_ids": ids} for kind, ids in records)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    answers = [(prompt.tolist(), output.tolist()) for prompt, output in read_trace(path)]
    assert answers == [([5], [6, 7]), ([8], [9])]


def test_replay_prints_a_table_and_writes_its_rows(
    tmp_path: Path, report_of: ReportOf, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = write_trace(tmp_path / "mine.jsonl.gz", rows=4)
    first, second = report_of("replay", str(trace), "--budget", "4", "--budget", "16", "--limit", "3")["rows"]
    assert "mine" in capsys.readouterr().out
    assert first.keys() == {
        "trace", "known", "strategy", "budget", "acceptance_length", "draft_us", "learn_us_per_token",
        "bytes_per_token", "drafted_per_step",
    }  # fmt: skip
    assert [first[name] for name in ("trace", "strategy", "budget")] == ["mine", "trie", 4]
    assert second["acceptance_length"] > first["acceptance_length"] > 1.0


COUNTING = """
class Engine:
    version = ""

    def __init__(self, request):
        pass

    def replay(self, recordings, **options):
        return {"steps": 20, "tokens": 53, "drafted": 30, "draft_us": 9.0}

    def memory(self, recordings):
        return {"bytes_per_token": 3000.0}
"""


@pytest.mark.parametrize("peer", ["vllm", "sglang"])
def test_the_drafts_of_a_peer_are_replayed_beside_ours(
    peer: str, tmp_path: Path, report_of: ReportOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The programs of the peers run in their environments; here each counts nothing."""
    (tmp_path / "counting.py").write_text(COUNTING)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    program = Path(process.__file__).with_name("serve_peer.py")
    monkeypatch.setattr(process, "command_of", lambda *names: [sys.executable, str(program), "counting"])
    trace = write_trace(tmp_path / "mine.jsonl", rows=4)
    chains = ["--chains", "3", "--cut", "0.05"] if peer == "vllm" else []
    rows = report_of("replay", str(trace), "--budget", "16", "--peer", peer, *chains)["rows"]
    cases = [(row["strategy"], row["known"], row["budget"]) for row in rows]
    if peer == "vllm":
        assert cases == [("trie", "nothing", 16), ("suffix", "nothing", 3)]
        assert 0.0 < rows[0]["drafted_per_step"] <= 3.0
    else:
        assert cases == [(name, known, 16) for known in ("nothing", "half") for name in ("trie", "sglang")]
        assert [row["bytes_per_token"] for row in rows[1::2]] == [3000.0, 3000.0]
    assert 1.0 < rows[0]["acceptance_length"] <= (4.0 if peer == "vllm" else 16.0)
    assert rows[1]["acceptance_length"] == 2.65


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        ("replay absent.jsonl", 2, "absent.jsonl"),
        ("replay --strategy tire TRACE", 2, "tire"),
        ("replay --budget 0 TRACE", 2, "--budget"),
        ("replay --chains 0 TRACE", 2, "--chains"),
        ("replay --chains 4 --cut 1.5 TRACE", 2, "--cut"),
        ("replay --peer vllm TRACE", 2, "give --chains"),
        ("replay --peer sglang TRACE", 1, "run `make peers`"),
        ("replay --device-drafts --strategy hybrid TRACE", 2, "--device-drafts"),
        ("replay --device-drafts --chains 4 TRACE", 2, "without --chains and --peer"),
        ("replay --device-drafts --budget 65 TRACE", 2, "at most 64 nodes"),
        ("memory absent.jsonl", 2, "absent.jsonl"),
    ],
)
def test_the_commands_refuse_what_they_cannot_do(
    tmp_path: Path,
    arguments: str,
    status: int,
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(process, "ENVIRONMENTS", tmp_path)
    trace = write_trace(tmp_path / "mine.jsonl", rows=1)
    assert bench(arguments.replace("TRACE", str(trace)).split()) == status
    assert message in capsys.readouterr().err


def test_made_up_text_is_the_same_in_every_run_and_has_phrases() -> None:
    first, again = ([text.tolist() for pair in synthetic(40) for text in pair] for _ in range(2))
    assert first == again
    triples = [tuple(text[at : at + 3]) for text in first[1::2] for at in range(len(text) - 2)]
    assert len(set(triples)) < 0.8 * len(triples)


def test_the_memory_holds_what_was_asked_for_of_outputs_first() -> None:
    row = row_of("trie", 5000, 8, [synthetic(40)], measured=2)
    assert (row["tokens"], row["strategy"], row["budget"]) == (5000, "trie", 8)
    assert min(row["draft_us"], row["learn_us_per_token"]) > 0
    assert 4 < row["bytes_per_token"] < 200
    prompts = [(np.full(500, 7, np.int32), np.arange(k, k + 400, dtype=np.int32)) for k in range(5)]
    assert row_of("trie", 1500, 8, [prompts], measured=1)["tokens"] == 1500


@pytest.mark.parametrize(
    ("name", "tokens", "message"),
    [("trie", 10**6, "fill a memory with"), ("recycling", 1000, "keeps no memory"), ("tire", 1000, "tire")],
)
def test_what_cannot_be_measured_is_refused(name: str, tokens: int, message: str) -> None:
    with pytest.raises(DraftwoodError, match=message):
        row_of(name, tokens, 8, [synthetic(10)], measured=2)


def test_memory_prints_a_table_and_writes_its_rows(
    tmp_path: Path, report_of: ReportOf, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = write_trace(tmp_path / "mine.jsonl", rows=60)
    rows = report_of("memory", str(trace), "--tokens", "1000", "--tokens", "1500", "--measured", "3")["rows"]
    assert "1,500" in capsys.readouterr().out
    assert [row["tokens"] for row in rows] == [1000, 1500]
    assert rows[0].keys() == {"tokens", "strategy", "budget", "draft_us", "learn_us_per_token", "bytes_per_token"}


def test_device_drafts_are_replayed_beside_those_of_the_host(
    tmp_path: Path, report_of: ReportOf, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = write_trace(tmp_path / "mine.jsonl", rows=3)
    rows = report_of("replay", str(trace), "--device-drafts", "--budget", "4", "--budget", "16")
    assert "host" in capsys.readouterr().out
    for row, budget in zip(rows["rows"], (4, 16), strict=True):
        assert (row["trace"], row["strategy"], row["budget"]) == ("mine", "trie", budget)
        assert row["acceptance_length"] == pytest.approx(row["host_acceptance_length"], rel=0.1)
        assert row["acceptance_length"] > 1.5
        assert 100 < row["bytes_per_token"] < 100_000
