"""The outcome of a request in an experiment, as an engine's worker sees it: from its first token on."""

from __future__ import annotations

import time

from draftwood_memory.engines.session import Session
from draftwood_tenants.experiments.outcomes import Outcome


def outcome_of(session: Session) -> Outcome | None:
    """What is counted of a request that has ended; None for one that wrote nothing.

    The worker sees neither when a request arrived nor whether it finished or was aborted. So there is no TTFT, the
    first token is the arrival, and a request that was aborted counts with what it wrote: time and tokens belong
    together. Tokens behind one that ends the request are of the last step's draft, and are dropped.
    """
    if not session.output:
        return None
    stats, last = session.stats, session.output[-1].tolist()
    ends = next((at for at, token in enumerate(last) if token in session.stop_token_ids), len(last) - 1)
    beyond = len(last) - 1 - ends
    return Outcome(
        arrived_at=time.time() - (time.perf_counter() - stats.first_at),
        prompt_tokens=int(session.request.prompt.size),
        tokens=max(sum(piece.shape[0] for piece in session.output[1:]) - beyond, 0),
        steps=stats.decode_steps - 1,
        decode_seconds=stats.last_at - stats.first_at,
        draft_nodes=stats.drafted,
        accepted_tokens=stats.accepted - max(beyond - 1, 0),  # the last token of a step is the model's own
    )
