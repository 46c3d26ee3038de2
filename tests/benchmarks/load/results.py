"""Results of requests for tests."""

from __future__ import annotations

import grpc

from draftwood_benchmarks.load.closed_loop import RequestResult
from draftwood_client import UnavailableError
from draftwood_client.errors import ErrorDetails


def failed() -> RequestResult:
    return RequestResult(5.0, error=UnavailableError(ErrorDetails(grpc.StatusCode.UNAVAILABLE, "gone")))
