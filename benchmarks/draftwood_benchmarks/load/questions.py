"""The requests of `draftwood bench load`: with drafting, no tenant gets the same question twice.

The answer to a repeated question would be drafted whole from the tenant's memory, which is unlike real traffic. So each
tenant gets each measured question once. Then comes another tenant, warmed up like the first.
"""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import count

from draftwood_benchmarks.harness.report import BenchmarkError
from draftwood_benchmarks.load.closed_loop import Request, closed_loop
from draftwood_client import AsyncClient, ChatMessage, GenerateOptions, ModelInfo, Prompt

Text = str | Sequence[ChatMessage | Mapping[str, str]]
"""A prompt that is not yet token ids."""
_WARM_UP_CLIENTS = 8
"""Clients that send the warm-up requests; affects the time of the warm-up only."""


class Questions:
    """Hands out requests.

    Args:
        target: the service, for warm-up requests.
        measured: prompts to hand out.
        others: prompts of the warm-up.
        options: options of every request.
    """

    def __init__(
        self, target: str, measured: Sequence[Prompt], others: Sequence[Prompt], options: GenerateOptions
    ) -> None:
        self._target = target
        self._measured = measured
        self._others = others
        self._options = options
        self._tenants = count(1)
        self._plain: deque[Request] = deque()
        self._drafted: deque[Request] = deque()

    def plain(self) -> Request:
        """The next request without drafting; there is always one."""
        if not self._plain:
            self._plain.extend(self._of_new_tenant(drafting=False))
        return self._plain.popleft()

    def drafted(self) -> Request | None:
        """The next request with drafting; None if all prepared ones have been handed out."""
        return self._drafted.popleft() if self._drafted else None

    async def prepare(self, needed: int) -> None:
        """Warms up tenants until `needed` requests with drafting are prepared.

        Raises:
            BenchmarkError: a request of the warm-up failed.
        """
        while len(self._drafted) < needed:
            requests = self._of_new_tenant(drafting=True)
            learning = take_from(Request(prompt, requests[0].options) for prompt in self._others)
            learned = await closed_loop(self._target, _WARM_UP_CLIENTS, learning, math.inf)
            if failed := [result.error for result in learned.results if result.error is not None]:
                raise BenchmarkError(f"a request of the warm-up failed: {failed[0]}")
            self._drafted.extend(requests)

    def _of_new_tenant(self, *, drafting: bool) -> list[Request]:
        """All measured questions as requests of a new tenant, in random order."""
        number = next(self._tenants)
        options: GenerateOptions = {**self._options, "tenant": f"bench-{number}", "drafting": drafting}
        order = random.Random(number).sample(self._measured, len(self._measured))
        return [Request(prompt, options) for prompt in order]


def take_from(requests: Iterable[Request]) -> Callable[[], Request | None]:
    """A function that returns the next request, and None after the last."""
    left = iter(requests)
    return lambda: next(left, None)


async def fitting(client: AsyncClient, info: ModelInfo, texts: Sequence[str], max_tokens: int) -> list[Text]:
    """The texts that fit the context with an answer of `max_tokens`; chat messages if the model has a chat template."""
    prompts: list[Text] = []
    for text in texts:
        source: Text = [ChatMessage("user", text)] if info.has_chat_template else text
        if len((await client.tokenize(source)).token_ids) + max_tokens <= info.max_context_tokens:
            prompts.append(source)
    return prompts
