"""`draftwood bench` and its subcommands on the command line."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from draftwood_benchmarks.commands import COMMANDS, bench
from tests.benchmarks.conftest import ReportOf

system = pytest.mark.system


def test_the_list_of_subcommands_imports_none_of_them() -> None:
    program = (
        "import sys\nfrom draftwood_benchmarks.commands import bench\nstatus = bench(['--help'])\n"
        "heavy = {'torch', 'numba', 'transformers', 'matplotlib'} & set(sys.modules)\n"
        "sys.exit(f'imported {heavy}' if heavy else status)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    for name, (_, line) in COMMANDS.items():
        assert name in done.stdout
        assert line in done.stdout


@pytest.mark.parametrize("name", COMMANDS)
def test_every_subcommand_explains_itself(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench([name, "--help"]) == 0
    help_text = capsys.readouterr().out
    assert "--json" in help_text
    if name not in ("replay", "memory", "gpu", "overhead"):
        assert "--device" in help_text
        assert "--threads" in help_text


@system
def test_two_services_are_compared_in_turn(report_of: ReportOf) -> None:
    of_b = ["--b-observed", "--b-gateway"]
    report = report_of("ab", *of_b, "--streams", "2", "--pairs", "2", "--max-tokens", "4")
    (row,) = report["rows"]
    assert (row["streams"], row["pairs"]) == (2, 2)
    assert 0 < row["low"] <= row["ratio"] <= row["high"]
    assert [report[name] for name in ("b_gateway", "b_observed")] == [True, True]


@system
def test_the_work_of_the_host_is_measured_by_strategy(report_of: ReportOf) -> None:
    rows = report_of("overhead", "--streams", "2", "--rounds", "1")["rows"]
    assert [row["what"] for row in rows] == [f"a warm step, {name}" for name in ("none", "trie", "hybrid")]
    assert all(row["size"] == 2 and row["host_us"] > 0 for row in rows)


@pytest.mark.slow
def test_what_grows_is_measured_against_what_it_grows_with(tmp_path: Path, report_of: ReportOf) -> None:
    picture = tmp_path / "growth.svg"
    times: dict[tuple[str, str], list[float]] = {}
    for row in report_of("overhead", "--growth", "--rounds", "1", "--plot", str(picture))["rows"]:
        times.setdefault((row["grows_with"], row["what"]), []).append(row["host_us"])
    assert {quantity for quantity, _ in times} == {"vocabulary", "context", "prompt", "memory"}
    assert all(min(of_case) > 0 for of_case in times.values())
    for quantity in ("context", "memory"):  # a hundred times as many tokens
        (of_case,) = (of_case for (name, _), of_case in times.items() if name == quantity)
        assert of_case[-1] < 5 * of_case[0]
    assert "<svg" in picture.read_text()


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        ("step --shape 14b", 2, "error: shape: '14b' is not allowed; it must be one of native, 110m"),
        ("step --shape 64x2x2x128", 2, "grows from 256x6x4x704 and cannot lose hidden"),
        ("step --device abacus", 2, "it must be auto, cpu, cuda or cuda:N"),
        ("step --model /no/such/model", 1, "no such folder; give a folder or a hub id"),
        ("step --json /no/such/folder/x.json", 2, "--json /no/such/folder/x.json: its folder does not exist"),
        ("speed --strategy magic", 2, "strategy: 'magic' is not allowed; it must be one of"),
        pytest.param("speed --prompts /no/such/file", 1, "/no/such/file", marks=system),
        pytest.param("speed --limit 100 --warm 100", 1, "but only 140 fit the model", marks=system),
        ("speed --peer openvino-genai --text random", 2, "it decodes greedily"),
        ("speed --text random --sampled", 2, "--sampled"),
        ("speed --peer openvino-genai --peer-drafts suffix", 2, "must be one of none, prompt-lookup with --peer openv"),
        ("load --peer vllm --peer-drafts prompt-lookup", 2, "one of none, ngram, suffix, draftwood with --peer vllm"),
        ("speed --weights int8 --runner torch", 2, "it must be as-is with runner torch"),
        ("load --concurrency 1,x", 2, "it must be numbers from 1 to 4096"),
        pytest.param("load --warm 140", 1, "leave none to measure", marks=pytest.mark.slow),
        ("ab", 2, "must differ from A"),
    ],
)
def test_errors_are_one_line_with_a_status(
    arguments: str, status: int, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench(arguments.split()) == status
    error = capsys.readouterr().err
    assert message in error
    assert error.startswith("error: ")
    assert error.count("\n") == 1


@pytest.mark.parametrize("arguments", ["nope", "step --largest 1", "speed --text verse", "step x"])
def test_wrong_usage_is_status_2(arguments: str) -> None:
    assert bench(arguments.split()) == 2
