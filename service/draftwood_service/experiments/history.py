"""Earlier looks at an experiment, for a plot over time. Later looks are further apart: a year has 500 of them."""

from __future__ import annotations

import zlib

from google.protobuf.message import DecodeError

from draftwood.admin.v1 import experiments_pb2 as pb
from draftwood_memory.errors import CorruptValueError

LEAST_SECONDS, SHARE_OF_AGE = 10.0, 0.025
"""Between two looks: as long, or this share of the experiment's age."""
_MOST = 600
_MOST_BYTES = 4 * 2**20


def is_due(points: list[pb.ReportPoint], started_at: float, now: float) -> bool:
    """Whether it is time for another look; times in seconds since the epoch."""
    if not points:
        return True
    last = points[-1].time.ToNanoseconds() * 1e-9
    return now - last >= max(LEAST_SECONDS, SHARE_OF_AGE * (now - started_at))


def encode(points: list[pb.ReportPoint]) -> bytes:
    return zlib.compress(pb.ExperimentReport(history=points[-_MOST:]).SerializeToString())


def decode(data: bytes) -> list[pb.ReportPoint]:
    """Raises CorruptValueError."""
    if not data:
        return []
    try:
        return [*pb.ExperimentReport.FromString(zlib.decompressobj().decompress(data, _MOST_BYTES)).history]
    except (zlib.error, DecodeError) as error:
        raise CorruptValueError(f"looks at an experiment: {error}") from None
