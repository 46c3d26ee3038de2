"""SGLang's n-gram worker with our corpus, made by its own constructor, on the CPU."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from draftwood_sglang import worker as plugin
from draftwood_tenants import engines as opening

REPOSITORY = Path(__file__).resolve().parents[2]
BUNDLED_MODEL = str(REPOSITORY / "model_runner" / "draftwood_model_runner" / "loading" / "demo")
VOCABULARY = 512
TEXT = (np.random.default_rng(9).permutation(500)[:60] + 1).tolist()


def registered() -> Any:
    """The algorithm, as SGLang finds it."""
    from sglang.srt.speculative import spec_registry

    if plugin.ALGORITHM not in spec_registry._REGISTRY:
        plugin.register()
    return spec_registry.get_spec(plugin.ALGORITHM)


def server_args(algorithm: str = plugin.ALGORITHM, nodes: int | None = 8, **others: Any) -> Any:
    """Resolved by SGLang's whole pipeline, as for a server on a GPU."""
    from sglang.srt import runtime_context
    from sglang.srt.server_args import ServerArgs

    registered()
    given = {"model_path": BUNDLED_MODEL, "device": "cuda", "page_size": 1, **others}
    args = ServerArgs(speculative_algorithm=algorithm, speculative_num_draft_tokens=nodes, **given)
    runtime_context.publish(args, role="scheduler")
    return args


@contextmanager
def running_worker(monkeypatch: pytest.MonkeyPatch, nodes: int = 8, batch: int = 8, **others: Any) -> Iterator[Any]:
    """A worker with memory for `batch` requests."""
    from sglang.kernels.ops.speculative import cache_locs
    from sglang.srt import runtime_context

    args = server_args(nodes=nodes, **others)
    monkeypatch.setattr(cache_locs, "_is_cuda", True)  # its kernel in Triton, interpreted
    with runtime_context.get_device().override(device="cpu"):
        config = SimpleNamespace(model_path=BUNDLED_MODEL, vocab_size=VOCABULARY)
        pool = SimpleNamespace(req_to_token=torch.arange(batch * 1024, dtype=torch.int32).reshape(batch, 1024))
        target = SimpleNamespace(
            model_runner=SimpleNamespace(max_running_requests=batch, watermark_state=None),
            model_config=config,
            tokenizer=None,
            get_memory_pool=lambda: (pool, None),
        )
        finalizers: list[Any] = []
        monkeypatch.setattr(opening, "Finalize", lambda _, close, exitpriority: finalizers.append(close))
        made = registered().create_worker(args)(args, 0, 0, target)
        made.alloc_memory_pool()
        try:
            yield made
        finally:
            for close in finalizers:
                close()


def request(name: str, prompt: Sequence[int], most: int = 64, **options: Any) -> Any:
    """A request of SGLang's, as its scheduler makes it. Options are those of the drafts."""
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.sampling.sampling_params import SamplingParams

    params = SamplingParams(max_new_tokens=most, custom_params=options or None)
    return Req(name, "", array("q", prompt), params, eos_token_ids=None, vocab_size=VOCABULARY)


def prepared(worker: Any, reqs: Sequence[Any], latest: Sequence[Sequence[int]] | None) -> Any:
    """A batch that decodes, with what the worker reads of a `ScheduleBatch`, after its whole preparation.

    Args:
        reqs: its requests, each with one token at least.
        latest: what the latest step wrote for each, which `output_ids` lack; None if nothing is missing there.
    """
    from sglang.srt.model_executor.forward_batch_info import ForwardMode
    from sglang.srt.speculative.ngram_info import NgramVerifyInput

    n, pieces = worker.draft_token_num, latest or [[] for _ in reqs]
    accepted = torch.zeros(len(reqs), n, dtype=torch.int32)
    for row, piece in zip(accepted, pieces, strict=True):
        row[: len(piece)] = torch.tensor(piece, dtype=torch.int32)
    # The last token of each text is not in the KV cache yet.
    texts = zip(reqs, pieces, strict=True)
    lengths = torch.tensor([len(req.origin_input_ids) + len(req.output_ids) + len(piece) - 1 for req, piece in texts])
    batch = SimpleNamespace(
        reqs=[*reqs],
        forward_mode=ForwardMode.DECODE,
        seq_lens=lengths,
        seq_lens_cpu=lengths.clone(),
        req_pool_indices=torch.arange(len(reqs), dtype=torch.int64),
        req_to_token_pool=worker.req_to_token_pool,
        has_grammar=latest is None,
        grammar_needs_sync=lambda: latest is None,
        spec_info=NgramVerifyInput(
            draft_token_num=n,
            new_seq_lens=lengths.clone(),
            accept_tokens=accepted.flatten(),
            accept_lens=torch.tensor([len(piece) for piece in pieces], dtype=torch.int32),
        ),
    )
    worker._prepare_for_speculative_decoding(batch)
    return batch


def finish(req: Any, length: int | None = None) -> None:
    """SGLang notices that a request has ended."""
    from sglang.srt.managers.schedule_batch import FINISH_LENGTH

    req.finished_reason = FINISH_LENGTH(length=len(req.output_ids))
    req.finished_len = length


def drafted(worker: Any, req: Any, piece: list[int]) -> list[int]:
    """The longest path of the tree that is drafted after `piece`; the request's output then has it."""
    nodes = worker.draft_token_num
    info = prepared(worker, [req], [piece]).spec_info
    req.output_ids.extend(piece)
    length = len(req.origin_input_ids) + len(req.output_ids) - 1
    mask = info.custom_mask.reshape(nodes, length + nodes)[:, length:]
    path = mask[int(mask.sum(1).argmax())]
    return [int(token) for token in info.draft_token[path]][1:]


def answered(worker: Any, name: str, text: list[int] = TEXT, **options: Any) -> int:
    """Tokens drafted for a request that writes a text; it then ends."""
    req, found = request(name, text[:6], **options), 0
    for token in text[6:40]:
        path = drafted(worker, req, [token])
        at = 6 + len(req.output_ids)
        found += len(path) > 1 and path == text[at : at + len(path)]
    finish(req)
    worker.ngram_corpus.erase_match_state([name])
    return found


def learn_for(worker: Any, *tenants: str) -> None:
    """Loads their memories, so that the first steps of their requests draft."""
    for tenant in tenants:
        worker.ngram_corpus.drafts.memory.strategy(tenant, "trie")
