"""What `draftwood bench load` asks: with drafting, nothing that a tenant was asked before.

An answer that the tenant's memory holds would be drafted whole, which is not what serving is like. So each tenant is
asked each measured question once, and when there are none left, another tenant takes over, warmed up like the first.
"""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from itertools import count

from benchmarks.closed_loop import Ask, closed_loop
from benchmarks.report import BenchmarkError
from draftwood_client import AsyncClient, ChatMessage, GenerateOptions, ModelInfo, Prompt

_WARM_UP_CLIENTS = 8


class Questions:
    """Hands out requests.

    Args:
        target: the service that memories are warmed up on.
        measured: the prompts to hand out.
        others: the prompts that memories learn from.
        options: of every request.
    """

    def __init__(
        self, target: str, measured: Sequence[Prompt], others: Sequence[Prompt], options: GenerateOptions
    ) -> None:
        self._target = target
        self._measured = measured
        self._others = others
        self._options = options
        self._tenants = count(1)
        self._plain: deque[Ask] = deque()
        self._drafted: deque[Ask] = deque()

    def plain(self) -> Ask:
        """The next one to ask without drafting; there is always one."""
        if not self._plain:
            self._plain.extend(self._of_new_tenant(drafting=False))
        return self._plain.popleft()

    def drafted(self) -> Ask | None:
        """The next one to ask with drafting; None where all that were prepared are out."""
        return self._drafted.popleft() if self._drafted else None

    async def prepare(self, needed: int) -> None:
        """Warms up tenants until there are `needed` questions to ask with drafting.

        Raises:
            BenchmarkError: a request of the warm-up failed.
        """
        while len(self._drafted) < needed:
            asks = self._of_new_tenant(drafting=True)
            learning = taker(Ask(prompt, asks[0].options) for prompt in self._others)
            learned = await closed_loop(self._target, _WARM_UP_CLIENTS, learning, math.inf)
            if failed := [asked.error for asked in learned.asked if asked.error is not None]:
                raise BenchmarkError(f"a request of the warm-up failed: {failed[0]}")
            self._drafted.extend(asks)

    def _of_new_tenant(self, *, drafting: bool) -> list[Ask]:
        """All measured questions, in an order of its own."""
        number = next(self._tenants)
        options: GenerateOptions = {**self._options, "tenant": f"bench-{number}", "drafting": drafting}
        order = random.Random(number).sample(self._measured, len(self._measured))
        return [Ask(prompt, options) for prompt in order]


def taker(asks: Iterable[Ask]) -> Callable[[], Ask | None]:
    """Takes them one by one, then None."""
    left = iter(asks)
    return lambda: next(left, None)


async def fitting(client: AsyncClient, info: ModelInfo, texts: Sequence[str], max_tokens: int) -> list[Prompt]:
    """The texts that leave room for an answer, as questions where the model chats, else as texts to continue."""
    prompts: list[Prompt] = []
    for text in texts:
        source = [ChatMessage("user", text)] if info.has_chat_template else text
        if len((await client.tokenize(source)).token_ids) + max_tokens <= info.max_context_tokens:
            prompts.append(source)
    return prompts
