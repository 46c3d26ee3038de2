"""What the cuda runner is to reach on an H200 in bfloat16 with a model of 7B, and what a run of `bench gpu` reached."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

Rows = list[dict[str, Any]]
_CONTEXT, _TREE, _MANY = 2048, 64, 256


class Target(NamedTuple):
    """A figure and its bound.

    Attributes:
        needs: sections that it is computed from.
        figure: from these sections; raises StopIteration where a row is missing.
        at_least: whether it is to be at least the bound, or at most.
    """

    name: str
    bound: float
    needs: tuple[str, ...]
    figure: Callable[..., float]
    at_least: bool = False

    def row(self, sections: Mapping[str, Rows]) -> dict[str, Any]:
        """What was reached; None where it was not measured."""
        try:
            reached = self.figure(*(sections[name] for name in self.needs))
        except (KeyError, StopIteration):
            return {"target": self.name, "bound": self.bound, "reached": None, "met": None}
        met = reached >= self.bound if self.at_least else reached <= self.bound
        return {"target": self.name, "bound": self.bound, "reached": reached, "met": met}


def targets(sections: Mapping[str, Rows]) -> Rows:
    """A row for each target."""
    return [target.row(sections) for target in _TARGETS]


def _row(rows: Rows, **wanted: Any) -> dict[str, Any]:
    return next(row for row in rows if all(row[name] == value for name, value in wanted.items()))


def _over_floor(steps: Rows) -> float:
    one = _row(steps, context=_CONTEXT, tokens=1)
    return float(one["ms"] / one["floor_ms"])


def _tree_over_one(steps: Rows) -> float:
    return float(_row(steps, context=_CONTEXT, tokens=_TREE)["ms"] / _row(steps, context=_CONTEXT, tokens=1)["ms"])


def _host_us(streams: Rows) -> float:
    return max(float(row["host_us_per_step"]) for row in _some(streams, streams=1))


def _off_over_transformers(streams: Rows, transformers: Rows) -> float:
    off = _row(streams, streams=1, strategy="none")
    return float(off["tokens_per_s"] / _row(transformers)["tokens_per_s"])


def _warm_over_off(streams: Rows) -> float:
    return max(float(row["over_off"]) for row in _some(streams, streams=1, memory="warm"))


def _least_over_off(streams: Rows) -> float:
    return min(float(row["over_off"]) for row in _some(streams, streams=_MANY))


def _host_share(streams: Rows) -> float:
    return max(float(row["host_share"]) for row in _some(streams, streams=64))


def _some(rows: Rows, **wanted: Any) -> Iterable[dict[str, Any]]:
    """Those with the values wanted, at least one."""
    first = _row(rows, **wanted)
    return [first, *(row for row in rows if row is not first and all(row[k] == v for k, v in wanted.items()))]


_TARGETS = (
    Target("one token over the floor, context 2,048", 1.25, ("steps",), _over_floor),
    Target("64 tokens over one, context 2,048", 1.2, ("steps",), _tree_over_one),
    Target("host at one stream, us a step", 250.0, ("streams",), _host_us),
    Target("share of a step that the host takes, 64 streams", 0.05, ("streams",), _host_share),
    Target("drafting off over transformers, eager", 3.0, ("streams", "transformers"), _off_over_transformers, True),
    Target("warm over drafting off, one stream", 5.4, ("streams",), _warm_over_off, True),
    Target("throughput with drafts over without, 256 streams", 1.0, ("streams",), _least_over_off, True),
)
