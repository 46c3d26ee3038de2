"""`draftwood bench replay`, and what it replays."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest

from draftwood_benchmarks.commands import bench
from draftwood_benchmarks.peers import process
from draftwood_benchmarks.peers.sglang_replay import _accepted
from draftwood_benchmarks.replay import (
    Recording,
    Replayed,
    TraceError,
    _change,
    accepted_length,
    interval,
    read_trace,
    replay,
)
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
    assert (result.steps, result.tokens, result.drafted, result.acceptance_length) == ([3], 6, 6, 2.0)
    assert strategy.closed == 1


def test_without_drafts_every_step_writes_one_token() -> None:
    result = replay(NoDrafts(), [recording([1, 2], [3, 4, 5]), recording([1], [9])], budget=8)
    assert (result.steps, result.tokens, result.acceptance_length, result.bytes_per_token) == ([2, 0], 2, 1.0, None)
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


def test_strategies_are_compared_with_the_first_one_answer_by_answer(
    tmp_path: Path, report_of: ReportOf, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = write_trace(tmp_path / "mine.jsonl.gz", rows=4)
    strategies = ["none", "trie,branch_length=1,learn=both", "hybrid"]
    options = [word for name in strategies for word in ("--strategy", name)]
    rows = report_of("replay", str(trace), *options, "--budget", "4", "--budget", "16", "--limit", "3")["rows"]
    shown = " ".join(capsys.readouterr().out.split())
    assert "3 recorded answers, 90 tokens" in shown
    assert "hybrid reads the model's most probable tokens" in shown
    assert all(row.keys() == {
        "trace", "strategy", "budget", "acceptance_length", "draft_us", "learn_us_per_token", "bytes_per_token",
        "drafted_per_step", "levels_per_step", "speed", "change", "low", "high",
    } for row in rows)  # fmt: skip
    cases = [("mine", name, budget) for budget in (4, 16) for name in strategies]
    assert [(row["trace"], row["strategy"], row["budget"]) for row in rows] == cases
    off, short, long = rows[3:]
    assert (off["acceptance_length"], off["change"], off["low"]) == (1.0, None, None)
    assert short["low"] <= short["change"] < long["change"]
    assert long["acceptance_length"] == pytest.approx(1.0 + long["change"], abs=1e-3)
    assert long["acceptance_length"] > rows[2]["acceptance_length"], "more nodes"


@pytest.mark.system
def test_intervals_cover_the_true_change() -> None:
    """95% of 100; 84 or fewer have a probability of 0.0001 at 95% and of 0.01 at 92%."""
    random = np.random.default_rng(1)
    covered = 0
    for seed in range(100):
        control = random.integers(20, 100, 120)
        treatment = random.binomial(control, 0.8)
        low, high = interval(control, treatment, seed)
        covered += low <= 0.25 <= high
    assert covered > 84


def test_answers_that_differ_alike_leave_no_noise_and_those_without_a_step_change_nothing() -> None:
    assert interval([60, 30, 0], [30, 15, 0]) == pytest.approx((1.0, 1.0))
    control, treatment = [60, 30, 44], [30, 15, 40]
    assert interval([*control, *[0] * 50], [*treatment, *[0] * 50]) == interval(control, treatment)


def test_levels_of_a_models_drafts_take_their_share_of_the_time() -> None:
    off, head = Replayed([10, 4], tokens=14), Replayed([4, 2], tokens=14, draft_us=None, levels=[8, 0])
    assert head.times(0.5).tolist() == [8.0, 2.0]
    row = head.row(0.5)
    assert (row["speed"], row["acceptance_length"], row["levels_per_step"]) == (1.4, 2.3333, 1.3333)
    change = _change(off, head, 0.5)
    assert change["change"] == pytest.approx(0.4)
    assert change["low"] == pytest.approx(0.25), "only the first answer is drawn"
    assert change["high"] == pytest.approx(1.0), "only the second"


COUNTING = """
class Engine:
    version = ""

    def __init__(self, request):
        pass

    def replay(self, recordings, nodes):
        return {"steps": [5] * len(recordings), "tokens": 53, "drafted": 30, "draft_us": nodes}
"""


def test_the_drafts_of_sglang_are_replayed_beside_ours(
    tmp_path: Path, report_of: ReportOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its program runs in its environment; here it counts nothing."""
    (tmp_path / "counting.py").write_text(COUNTING)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    program = Path(process.__file__).with_name("serve_peer.py")
    monkeypatch.setattr(process, "command_of", lambda *names: [sys.executable, str(program), "counting"])
    trace = write_trace(tmp_path / "mine.jsonl", rows=4)
    ours, theirs = report_of("replay", str(trace), "--budget", "15", "--peer", "sglang")["rows"]
    assert (ours["strategy"], theirs["strategy"], theirs["acceptance_length"]) == ("trie", "sglang", 2.65)
    assert theirs["draft_us"] == 16, "it counts the last token as a node"
    assert theirs["bytes_per_token"] is None
    assert theirs["low"] <= theirs["change"] <= theirs["high"]


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        ("replay absent.jsonl", 2, "absent.jsonl"),
        ("replay --strategy tire TRACE", 2, "no strategy is named 'tire'"),
        ("replay --strategy trie,deep TRACE", 2, "--strategy trie,deep: it must be NAME[,OPTION=VALUE]..."),
        ("replay --strategy trie,branch_length=0 TRACE", 2, "--strategy trie,branch_length=0: "),
        ("replay --strategy trie,depth=3 TRACE", 2, "depth"),
        ("replay --budget 0 TRACE", 2, "--budget"),
        ("replay --draft-model small TRACE", 2, "--draft-model small: --model must say beside which model"),
        ("replay --peer sglang TRACE", 1, "run `make peers`"),
        ("replay SHORT", 1, "no recorded output has a second token"),
    ],
)
def test_the_command_refuses_what_it_cannot_do(
    tmp_path: Path,
    arguments: str,
    status: int,
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(process, "ENVIRONMENTS", tmp_path)
    trace, short = write_trace(tmp_path / "mine.jsonl", rows=1), tmp_path / "short.jsonl"
    short.write_text('{"prompt_ids": [1], "output_ids": [2]}\n')
    assert bench(arguments.replace("TRACE", str(trace)).replace("SHORT", str(short)).split()) == status
    assert message in capsys.readouterr().err
