"""`draftwood bench` and its subcommands on the command line."""

from __future__ import annotations

import subprocess
import sys

import pytest

from draftwood_benchmarks.commands import COMMANDS, bench

system = pytest.mark.system


def test_the_list_of_subcommands_imports_none_of_them() -> None:
    program = (
        "import sys\nfrom draftwood_benchmarks.commands import bench\nstatus = bench(['--help'])\n"
        "heavy = {'torch', 'numba', 'transformers'} & set(sys.modules)\n"
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
    if name not in ("replay", "gpu"):
        assert "--device" in help_text
        assert "--threads" in help_text


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        ("step --device abacus", 2, "it must be auto, cpu, cuda or cuda:N"),
        ("step --model /no/such/model", 1, "no such folder; give a folder or a hub id"),
        ("step --json /no/such/folder/x.json", 2, "--json /no/such/folder/x.json: its folder does not exist"),
        ("speed --strategy magic", 2, "strategy: 'magic' is not allowed; it must be one of"),
        pytest.param("speed --prompts /no/such/file", 1, "/no/such/file", marks=system),
        pytest.param("speed --limit 100 --warm 100", 1, "but only 140 fit the model", marks=system),
        ("speed --peer openvino-genai --peer-drafts suffix", 2, "must be one of none, prompt-lookup with --peer openv"),
        ("load --peer vllm --peer-drafts prompt-lookup", 2, "one of none, ngram, suffix, draftwood with --peer vllm"),
        ("speed --weights int8 --runner torch", 2, "it must be as-is with runner torch"),
        ("load --concurrency 1,x", 2, "it must be numbers from 1 to 4096"),
        pytest.param("load --warm 140", 1, "leave none to measure", marks=pytest.mark.slow),
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


@pytest.mark.parametrize("arguments", ["nope", "step --largest 1", "speed --limit 0", "step x"])
def test_wrong_usage_is_status_2(arguments: str) -> None:
    assert bench(arguments.split()) == 2
