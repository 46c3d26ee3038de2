"""Which options a CPU's instructions make faster."""

from __future__ import annotations

from pathlib import Path

import pytest

from draftwood_model_runner.runners.capacity.host import gains_over_float32


@pytest.mark.parametrize(
    ("flags", "options"),
    [
        ("fpu avx512f avx512_vnni avx512_bf16", ["--dtype bfloat16", "--weights int4"]),
        ("fpu avx2 avx_vnni", ["--weights int4"]),
        ("fpu amx_bf16", ["--dtype bfloat16"]),
        ("fpu avx2", []),
    ],
)
def test_options_that_the_instructions_make_faster(flags: str, options: list[str], tmp_path: Path) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text(f"processor : 0\nflags\t\t: {flags}\nbugs : none\n")
    gains = gains_over_float32(cpuinfo)
    assert [*gains] == options
    assert all(gain > 1 for gain in gains.values())


def test_none_where_the_system_does_not_say(tmp_path: Path) -> None:
    assert gains_over_float32(tmp_path / "absent") == {}
    (tmp_path / "arm").write_text("Features : fp asimd bf16\n")
    assert gains_over_float32(tmp_path / "arm") == {}
