from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from rich.table import Table

from tools.measurements import __main__ as runner
from tools.measurements import suite
from tools.measurements.__main__ import measure
from tools.measurements.page import markdown, section


def test_a_table_is_shown_with_its_caption() -> None:
    table = Table("engine", "tokens/s", caption="half the range")
    table.add_row("ours", "12.0")
    assert markdown(table) == "| engine | tokens/s |\n| --- | --- |\n| ours | 12.0 |\n\nhalf the range.\n"


@pytest.mark.parametrize(("busy", "warned"), [(0.02, False), (0.5, True)])
def test_a_section_says_how_and_where_it_was_measured(
    busy: float, warned: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(suite, "FOLDER", tmp_path)
    (one,) = (measurement for measurement in suite.MEASUREMENTS if measurement.name == "never-slower")
    run = {"command": "draftwood bench x", "date": "2026-01-02", "commit": "abc", "cores": 2, "processor": "a CPU"}
    row = {"case": "random text", "streams": 64, "off_tokens_per_s": 688.62, "vs_off": 0.9972, "drafted": 0.0}
    one.file.write_text(json.dumps({"run": run, "rows": [row], "busy": busy}))
    shown = section(one)
    assert f"2026-01-02, commit `abc`, 2 cores of a CPU; other processes took {busy:.0%} of the CPU time." in shown
    assert ("**Too much" in shown) == warned
    assert "draftwood bench x" in shown
    assert "| random text | 64 | 688.6 | - | 0.997 | >= 0.99 | 0.00 |" in shown


def test_paths_of_the_machine_are_given_and_do_not_reach_the_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(suite, "FOLDER", tmp_path)
    monkeypatch.setattr(runner, "FOLDER", tmp_path)
    ran: list[list[str]] = []

    def run(command: list[str], **_: object) -> None:
        ran.append(command)
        Path(command[-1]).write_text(json.dumps({"run": {"command": " ".join(command[:-2])}}))

    monkeypatch.setattr(subprocess, "run", run)
    with pytest.raises(SystemExit, match="paths are missing: code_model=PATH"):
        measure(["coder-code-int4"], {"prompts": "/my/prompts"})
    assert not ran
    measure(["coder-code-int4"], {"prompts": "/my/prompts", "code_model": "/my/coder.gguf"})
    [command] = ran
    assert command[command.index("--model") + 1] == "/my/coder.gguf"
    assert command[command.index("--prompts") + 1] == "/my/prompts/humaneval.jsonl"
    written = (tmp_path / "coder-code-int4.json").read_text()
    assert "/my/" not in written
    assert "--model $code_model" in written
    measure([])
    assert not any("/my/" in part for command in ran[1:] for part in command)
    assert len(ran) - 1 == sum("$" not in measurement.arguments for measurement in suite.MEASUREMENTS)


def test_an_unknown_measurement_is_named_before_anything_runs() -> None:
    with pytest.raises(SystemExit, match="no measurement nothing; there are smollm2-chat-bfloat16, "):
        measure(["never-slower", "nothing"])
