"""Decodes an answer again in vLLM, without drafts, and compares: the audit of an answer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from draftwood_model_runner.answer import ENDING_DIFFERS, Answer, Difference
from draftwood_model_runner.output import TokenLogprobs
from draftwood_model_runner.request import MAX_LOGPROBS, Request
from draftwood_model_runner.sampling.output_text import OutputText

_LARGEST_LOGIT = 16.0
"""vLLM reports log-probabilities, and their differences are those of logits; margins are over the largest logit, which
is 10 to 30 for most models."""


class VllmRedecoding:
    """One answer, decoded again from its beginning while nothing else runs.

    Args:
        begin: gives a request to vLLM and returns its id there.
        abort: ends it.
        text: of the answer, from its beginning.

    Attributes:
        id: of the request in vLLM; "" while it is not there.
        done: all tokens were compared, or one differs.
        difference: the first one, if there is any.
    """

    def __init__(
        self,
        answer: Answer,
        begin: Callable[[Request], str],
        abort: Callable[[str], None],
        text: Callable[[Request], OutputText],
    ) -> None:
        sampling = replace(answer.request.sampling, logprobs=MAX_LOGPROBS)
        self.id = ""
        self.done = False
        self.difference: Difference | None = None
        self._request = replace(
            answer.request, sampling=sampling, strategy_name="none", max_draft_nodes=0, learns=False
        )
        self._answer = answer
        self._begin = begin
        self._abort = abort
        self._make_text = text
        self._text = text(self._request)
        self._compared = 0

    @property
    def waits(self) -> bool:
        """Its next step is vLLM's."""
        return bool(self.id) and not self.done

    def step(self) -> None:
        """Gives the request to vLLM."""
        if not self.id:
            self._text, self._compared = self._make_text(self._request), 0
            self.id = self._begin(self._request)

    def take(self, token_ids: list[int], logprobs: list[TokenLogprobs], ended: str) -> None:
        """Compares what a step of vLLM wrote."""
        written = self._answer.output
        for token, found in zip(token_ids, logprobs, strict=False):
            if self.done:
                return
            if token != written[self._compared]:
                self._end(ended, Difference(self._compared, _margin(found, written[self._compared])))
                return
            self._compared += 1
            _, finish = self._text.push(token)
            if finish is not None or self._compared == len(written):
                same = self._compared == len(written) and finish == self._answer.finish
                self._end(ended, None if same else Difference(self._compared, ENDING_DIFFERS))
        if ended and not self.done:
            self._end(ended, Difference(self._compared, ENDING_DIFFERS))

    def pause(self) -> None:
        """Ends its request in vLLM, since the engine has others to run; the audit starts over later."""
        if self.waits:
            self._abort(self.id)
            self.id = ""

    def close(self) -> None:
        """Ends it, finished or not; idempotent."""
        self.pause()
        self.done = True

    def _end(self, ended: str, difference: Difference | None) -> None:
        self.difference = difference
        self.done = True
        if not ended:
            self._abort(self.id)


def _margin(found: TokenLogprobs, written: int) -> float:
    """By how much logits would have to be off, over the largest of them; at least so much if the token is none of the
    most probable ones."""
    known = dict(zip(found.top_token_ids, found.top_logprobs, strict=True))
    return abs(found.logprob - known.get(written, found.top_logprobs[-1])) / _LARGEST_LOGIT
