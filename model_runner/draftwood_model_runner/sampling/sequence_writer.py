"""Writes one sequence: walks its draft trees along the tokens of the model, and finds out where the output ends."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from draftwood_model_runner.output import Finish, TokenLogprobs
from draftwood_model_runner.runners.base import Predictions
from draftwood_model_runner.runners.choices import NOT_CHOSEN, ON_HOST, ScoreRules
from draftwood_model_runner.sampling.output_text import OutputText
from draftwood_model_runner.sampling.token_chooser import TokenChooser
from draftwood_model_runner.sampling.verify import ROOT_NODE, walk, walk_predicted
from draftwood_model_runner.sequence import Sequence
from draftwood_strategies.draft import Int32Array


@dataclass(eq=False, slots=True)
class AcceptedPath:
    """What a sequence writes in a step.

    Attributes:
        nodes: the accepted nodes of the draft tree, from the root down.
        token_ids: their tokens, and the model's own after them unless the output ends before it.
        texts, logprobs, finish: as in `StepOutput`.
    """

    nodes: list[int] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish: Finish | None = None


class SequenceWriter:
    """The state that choosing tokens and turning them into text needs, from the first token to the last.

    Attributes:
        logprobs: alternatives that the request wants with the log-probability of each token; None for none.
    """

    def __init__(self, sequence: Sequence, chooser: TokenChooser, text: OutputText) -> None:
        self.logprobs = sequence.request.sampling.logprobs
        self._chooser = chooser
        self._text = text
        self._rules: ScoreRules | int = ON_HOST

    def rules(self, tokens: Int32Array, parents: Int32Array) -> ScoreRules | int:
        """As `TokenChooser.rules`; the runner chooses so for the predictions that come next."""
        self._rules = self._chooser.rules(tokens, parents)
        return self._rules

    @property
    def follows_predictions(self) -> bool:
        """It writes the model's most probable tokens, whatever they are, and reports nothing else: see `write`."""
        return self.logprobs is None and self._chooser.follows_predictions

    def write(self, token_ids: list[int], nodes: list[int]) -> AcceptedPath:
        """The path that the model accepts, up to the token that ends the output, where it `follows_predictions`.

        Args:
            token_ids, nodes: of each step of the path its token and node; the last node is `ROOT_NODE`.
        """
        if (texts := self._text.push_within(token_ids)) is not None:
            return AcceptedPath([node - 1 for node in nodes[:-1]], token_ids, texts)
        texts = []
        for count, token in enumerate(token_ids, 1):
            text, finish = self._text.push(token)
            texts.append(text)
            if finish is not None:
                accepted = [node - 1 for node in nodes[:count] if node != ROOT_NODE]
                return AcceptedPath(accepted, token_ids[:count], texts, [], finish)
        return AcceptedPath([node - 1 for node in nodes[:-1]], token_ids, texts)

    def verify(self, tokens: Int32Array, parents: Int32Array, predictions: Predictions) -> AcceptedPath:
        """The path that the model accepts, up to the token that ends the output, or that a slow mask comes after.

        Args:
            tokens, parents: int32[n], the draft tree with its root, which is node 0.
            predictions: at each of these nodes.
        """
        path, at = AcceptedPath(), ROOT_NODE
        for token, node in self._walk(tokens, parents, predictions):
            if self.logprobs is not None:
                path.logprobs.append(self._logprobs(predictions, at, token))
            at = node
            text, path.finish = self._text.push(token)
            path.token_ids.append(token)
            path.texts.append(text)
            if node != ROOT_NODE and self._chooser.slow and not path.finish:
                break  # without the node: the token after it is chosen in another step
            if node != ROOT_NODE:
                path.nodes.append(node - 1)
            if path.finish:
                break
        return path

    def _logprobs(self, predictions: Predictions, node: int, token: int) -> TokenLogprobs:
        found = predictions.logprobs
        if found is None or predictions.chosen is None or int(predictions.chosen[node]) != token:
            return self._chooser.logprobs(predictions.logits[node], token)
        return TokenLogprobs(*found.at(node, self.logprobs or 0))

    def _walk(self, tokens: Int32Array, parents: Int32Array, predictions: Predictions) -> Iterator[tuple[int, int]]:
        chooser, logits, chosen, top = self._chooser, predictions.logits, predictions.chosen, predictions.top_tokens

        def choose(node: int) -> int:
            most_probable = predictions.tokens[node : node + 1] if top is None else top[node]
            return chooser.choose(logits[node], most_probable.tolist())

        if chosen is not None and isinstance(self._rules, ScoreRules):
            return self._remembered(walk_predicted(tokens, parents, chosen), choose)
        if chooser.follows_predictions:
            return walk_predicted(tokens, parents, predictions.tokens)
        return walk(tokens, parents, choose)

    def _remembered(self, path: Iterator[tuple[int, int]], choose: Callable[[int], int]) -> Iterator[tuple[int, int]]:
        """The path that the runner chose; its end is chosen here where the runner could not."""
        at = ROOT_NODE
        for token, node in path:
            if token == NOT_CHOSEN:
                token = choose(at)
            else:
                self._chooser.remember(token)
            yield token, node
            at = node
