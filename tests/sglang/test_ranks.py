"""Ranks of tensor parallelism, as processes with a group of gloo: the second one's trees are those of the first."""

from __future__ import annotations

from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace

import pytest

pytestmark = pytest.mark.sglang


def test_each_rank_verifies_the_trees_of_the_first(tmp_path: Path) -> None:
    context, found = get_context("spawn"), []
    pipes, processes = [], []
    for rank in (0, 1):
        ours, theirs = context.Pipe()
        processes.append(context.Process(target=_rank, args=(rank, str(tmp_path / "meeting"), theirs)))
        pipes.append(ours)
        processes[-1].start()
        theirs.close()
    try:
        for pipe in pipes:
            assert pipe.poll(400)
            found.append(pipe.recv())
    finally:
        for process in processes:
            process.kill()
            process.join()
    first, second = found
    assert first == second
    assert len({tuple(tree) for tree, _ in first}) > 20  # of the steps of a text that rank 0 knows, and of its first


def _rank(rank: int, meeting: str, pipe: Connection) -> None:
    import torch

    from tests.sglang import conftest  # noqa: F401  # lets SGLang be imported
    from tests.sglang.harness import TEXT, finish, learn_for, prepared, request, running_worker

    torch.distributed.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=2)
    trees = []
    with pytest.MonkeyPatch.context() as patch, running_worker(patch) as worker:
        worker._group = SimpleNamespace(ranks=[0, 1], cpu_group=torch.distributed.group.WORLD)
        # The second rank has a memory here that knows another text: it must not matter.
        learn_for(worker, "acme")
        for name, text in (("1", TEXT if rank == 0 else TEXT[::-1]), ("2", TEXT)):
            req = request(name, TEXT[:6], draftwood_tenant="acme")
            for token in text[6:36]:
                info = prepared(worker, [req], [[token]]).spec_info
                req.output_ids.append(token)
                if name == "2":
                    trees.append((info.draft_token.tolist(), info.custom_mask.tolist()))
            finish(req)
            worker.ngram_corpus.erase_match_state([name])
        pipe.send(trees)
    torch.distributed.barrier()
