"""The worker's preparation step with our corpus, on tensors of the CPU, against SGLang's own reconstruction."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.sglang.harness import VOCABULARY, prepared, request, running_worker

pytestmark = pytest.mark.sglang


@pytest.mark.parametrize("nodes", [2, 7, 16, 32])
def test_trees_of_random_batches_are_what_sglang_reconstructs(monkeypatch: pytest.MonkeyPatch, nodes: int) -> None:
    from sglang.srt.speculative.ngram_worker import _derive_tree_links

    random, drafted = np.random.default_rng(nodes), 0
    texts = random.integers(1, VOCABULARY, (6, 80)).tolist()
    with running_worker(monkeypatch, nodes, batch=4) as worker:
        live: list[tuple[Any, list[int], int]] = []
        for step in range(600 if nodes < 32 else 300):
            while len(live) < 4 and (not live or random.random() < 0.5):
                text = texts[random.integers(6)]
                at = int(random.integers(3, 20))
                req = request(f"r{random.integers(5)}-{step}", text[:at])
                live.append((req, text, at))
            reqs, pieces, kept = [], [], []
            for req, text, at in live:
                take = int(random.integers(1, min(nodes, 5) + 1))
                piece = text[at : at + take] or [1]
                if random.random() < 0.2:
                    piece[-1] = int(random.integers(1, VOCABULARY))
                reqs.append(req)
                pieces.append(piece)
                kept.append((req, text, at + take))
            batch = prepared(worker, reqs, pieces)
            info, bs = batch.spec_info, len(reqs)
            tokens = info.draft_token.reshape(bs, nodes).numpy()
            masks, offset = [], 0
            for length in batch.seq_lens.tolist():
                of_row = info.custom_mask[offset : offset + nodes * (length + nodes)].reshape(nodes, length + nodes)
                assert of_row[:, :length].all()  # every node sees the whole text
                masks.append(of_row[:, length:].numpy())
                offset += nodes * (length + nodes)
            assert offset == info.custom_mask.numel()
            mask = np.stack(masks)
            next_token, next_sibling = _derive_tree_links(mask.copy(), bs, nodes)
            assert (next_token.numpy() == info.retrieve_next_token.numpy()).all()
            assert (next_sibling.numpy() == info.retrieve_next_sibling.numpy()).all()
            depths = mask.sum(2) - 1
            assert (info.positions.reshape(bs, nodes).numpy() == batch.seq_lens.numpy()[:, None] + depths).all()
            assert [row[0] for row in tokens.tolist()] == [piece[-1] for piece in pieces]
            assert ((tokens >= 0) & (tokens < VOCABULARY)).all()
            for tree in mask:  # a node sees itself, and with a node what that one sees
                assert tree.diagonal().all()
                assert not np.triu(tree, 1).any()
                assert all((tree[j] <= tree[i]).all() for i in range(nodes) for j in range(i) if tree[i, j])
            drafted += int((depths > 1).sum())
            live = [one for one in kept if one[2] < 70 and random.random() > 0.05]
            for (req, _, _), piece in zip(kept, pieces, strict=True):
                req.output_ids.extend(piece)
            gone = [req.rid for req, _, _ in kept if req not in [one[0] for one in live]]
            worker.ngram_corpus.erase_match_state(gone)
        assert worker.ngram_corpus.drafts is not None
        assert worker.ngram_corpus.drafts.failures == {}
        assert nodes == 2 or drafted > 1000
