"""As `second_driver`, with a drafter of vLLM, and if `drafts` is true ours beside it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.vllm import driver, second_driver


class BesideDriver(second_driver.SecondDriver):
    """The engine, whose worker has a speculator of vLLM."""

    def __init__(self, engine: dict[str, Any], drafts: bool) -> None:
        option = {"additional_config": {"draftwood": True}} if drafts else {}
        driver.Driver.__init__(self, {**engine, **option}, drafts=False)
        if drafts:
            self.note_drafts()

    def note_drafts(self) -> None:
        """Counts in `drafted` the tokens of ours that are verified."""
        choose = self.ours._drafts.choose

        def noted(indexes: Any, *given: Any) -> Any:
            chosen = choose(indexes, *given)
            names = {state: name for name, state in self.rows().items()}
            for state, taken in zip(indexes.tolist(), chosen.ours.tolist(), strict=True):
                self.drafted[names[state]] += taken
            return chosen

        self.ours._drafts.choose = noted

    def break_ours(self) -> dict[str, Any]:
        """Our drafts raise in the next step."""
        self.ours._drafts._trie.propose_chains = None
        return {}

    def break_theirs(self) -> dict[str, Any]:
        """Their drafter raises in the next step."""
        self.runner.speculator.sample_draft = None
        return {}


if __name__ == "__main__":
    second_driver.main(BesideDriver)
