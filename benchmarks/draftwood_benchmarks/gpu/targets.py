"""What the cuda runner is to reach on an H200 in bfloat16 with a model of 7B, and what a run of `bench gpu` reached."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from draftwood_benchmarks.harness.report import Rows

_CONTEXT, _TREE, _MANY = 2048, 64, 256


def _step(sections: Mapping[str, Rows], tokens: int, figure: str = "ms") -> float:
    return next(_figures(sections["steps"], figure, context=_CONTEXT, tokens=tokens))


def _streams(sections: Mapping[str, Rows], figure: str, **wanted: Any) -> list[float]:
    return [*_figures(sections["streams"], figure, **wanted)]


def _figures(rows: Rows, figure: str, **wanted: Any) -> Iterator[float]:
    """Of the rows with the values wanted."""
    return (row[figure] for row in rows if all(row[name] == value for name, value in wanted.items()))


def _off_over_transformers(sections: Mapping[str, Rows]) -> float:
    (off,) = _streams(sections, "tokens_per_s", streams=1, strategy="none", memory="cold")
    return off / float(sections["transformers"][0]["tokens_per_s"])


_AT_MOST: dict[str, tuple[float, Callable[[Mapping[str, Rows]], float]]] = {
    "one token over the floor, context 2,048": (1.25, lambda of: _step(of, 1) / _step(of, 1, "floor_ms")),
    "64 tokens over one, context 2,048": (1.2, lambda of: _step(of, _TREE) / _step(of, 1)),
    "host at one stream, us a step": (250.0, lambda of: max(_streams(of, "host_us_per_step", streams=1))),
    "share of a step that the host takes, 64 streams": (0.05, lambda of: max(_streams(of, "host_share", streams=64))),
}
_AT_LEAST: dict[str, tuple[float, Callable[[Mapping[str, Rows]], float]]] = {
    "drafting off over transformers, eager": (3.0, _off_over_transformers),
    "same questions again over drafting off, one stream": (
        5.4,
        lambda of: max(_streams(of, "over_off", streams=1, memory="again")),
    ),
    "throughput with drafts over without, 256 streams": (1.0, lambda of: min(_streams(of, "over_off", streams=_MANY))),
}
"""By target, the bound and the figure from the sections."""


def targets(sections: Mapping[str, Rows]) -> Rows:
    """A row for each target; None where what it is computed from was not measured."""
    rows = []
    for name, (bound, figure) in {**_AT_MOST, **_AT_LEAST}.items():
        try:
            reached: float | None = figure(sections)
        except (KeyError, StopIteration, ValueError):  # no section, no row of the step, no row of the streams
            reached = None
        met = None if reached is None else reached >= bound if name in _AT_LEAST else reached <= bound
        rows.append({"target": name, "bound": bound, "reached": reached, "met": met})
    return rows
