"""The output of steps for a sample: made by the engine's host, sent over the link, merged until it is read."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from draftwood_model_runner.output import Finish, TokenLogprobs, VerifiedTree
from draftwood_model_runner.statistics import SequenceStats

MAX_PART_TOKENS = 1024
"""Tokens in one message, however slow the reader is. gRPC clients refuse messages above 4 MiB by default; with 20
log-probabilities a token, 1024 tokens take about 300 KiB."""
MAX_TREES = 64
"""Verified drafts in one message, the last ones. With 512 nodes each they take some 500 KiB."""


@dataclass(slots=True)
class Output:
    """What one or several steps wrote, as in `StepOutput`.

    Attributes:
        request: its id on the link.
        sample: number of the sample among those of the request.
        stats: of the sample, with its first output and its last.
    """

    request: int = 0
    sample: int = 0
    token_ids: list[int] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    drafted: list[bool] = field(default_factory=list)
    finish: Finish | None = None
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    trees: list[VerifiedTree] = field(default_factory=list)
    stats: SequenceStats | None = None

    def __reduce__(self) -> tuple[type[Output], tuple[Any, ...]]:
        """In half the time, and without names of fields: each step sends one for each sample."""
        own = self.request, self.sample, self.token_ids, self.texts, self.drafted
        return Output, (*own, self.finish, self.logprobs, self.trees, self.stats)

    def add(self, later: Output) -> None:
        """Appends later tokens of the sample, and its finish."""
        self.token_ids += later.token_ids
        self.texts += later.texts
        self.drafted += later.drafted
        self.logprobs += later.logprobs
        if later.trees:
            self.trees = [*self.trees, *later.trees][-MAX_TREES:]
        self.finish = later.finish

    def part(self, start: int, stop: int | None = None) -> Output:
        """The tokens from `start` to before `stop`, without the finish."""
        part = slice(start, stop)
        return Output(
            self.request,
            self.sample,
            self.token_ids[part],
            self.texts[part],
            self.drafted[part],
            logprobs=self.logprobs[part],
        )

    def remove(self, count: int) -> None:
        """Drops the first tokens."""
        for values in (self.token_ids, self.texts, self.drafted, self.logprobs):
            del values[:count]

    def parts(self, with_end: bool = False) -> Iterator[Output]:
        """The tokens in pieces of at most `MAX_PART_TOKENS`; the last one has the trees.

        Args:
            with_end: the last piece has the finish, and there is one without tokens if there is nothing but a finish.
        """
        alone = with_end and self.finish is not None and not self.token_ids
        for start in range(0, len(self.token_ids) or alone, MAX_PART_TOKENS):
            part = self.part(start, start + MAX_PART_TOKENS)
            if start + MAX_PART_TOKENS >= len(self.token_ids):
                part.trees = self.trees
                part.finish = self.finish if with_end else None
            yield part
