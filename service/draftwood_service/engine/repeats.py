"""Recognizes requests that a client sent again, so that their answers are learned once."""

from __future__ import annotations

from collections import OrderedDict

from draftwood_model_runner.request import Request

_MOST = 4096
"""Requests kept: a repeated one comes within seconds. 100 bytes each; not tuned."""


class RecentRequests:
    """The latest requests, by tenant, id and prompt: callers may give several requests of a conversation one id."""

    def __init__(self) -> None:
        self._seen: OrderedDict[tuple[str, str, int], None] = OrderedDict()

    def is_repeated(self, request: Request) -> bool:
        """Whether the request has come before; it counts as such from now on."""
        key = _key(request)
        repeated = key in self._seen
        self._seen[key] = None
        self._seen.move_to_end(key)
        if len(self._seen) > _MOST:
            self._seen.popitem(last=False)
        return repeated

    def forget(self, request: Request) -> None:
        """The request ended before anything was written, so that it teaches when it is repeated."""
        self._seen.pop(_key(request), None)


def _key(request: Request) -> tuple[str, str, int]:
    return request.tenant, request.request_id, hash(request.prompt.tobytes())
