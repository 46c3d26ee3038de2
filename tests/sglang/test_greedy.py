"""A small model that is run under the masks of SGLang's verification writes what it writes without drafts."""

from __future__ import annotations

import pytest
import torch

from tests.sglang.harness import finish, prepared, request, running_worker

pytestmark = pytest.mark.sglang

_WORDS = 48


def _model() -> torch.nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(5)
    config = LlamaConfig(
        vocab_size=_WORDS,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.25,
    )
    config._attn_implementation = "eager"
    made: torch.nn.Module = LlamaForCausalLM(config).double().eval()
    return made


def _plain(model: torch.nn.Module, prompt: list[int], most: int) -> list[int]:
    tokens = [*prompt]
    with torch.inference_mode():
        for _ in range(most):
            tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
    return tokens[len(prompt) :]


def _verified(model: torch.nn.Module, batch: object, texts: list[list[int]], nodes: int) -> list[list[int]]:
    """What each request writes: SGLang's input is computed, and its links are followed as its greedy kernel does."""
    info, written, offset = batch.spec_info, [], 0  # type: ignore[attr-defined]
    for row, text in enumerate(texts):
        length = len(text) - 1
        tree = info.draft_token.reshape(-1, nodes)[row]
        size = nodes * (length + nodes)
        below = info.custom_mask[offset : offset + size].reshape(nodes, length + nodes)
        offset += size
        above = torch.ones(length, length + nodes).tril().bool()
        mask = torch.where(torch.cat([above, below]), 0.0, float("-inf")).double()[None, None]
        positions = torch.cat([torch.arange(length), info.positions.reshape(-1, nodes)[row]])
        with torch.inference_mode():
            ids = torch.cat([torch.tensor(text[:-1]), tree])
            logits = model(ids[None], attention_mask=mask, position_ids=positions[None]).logits[0, length:]
        predicted, node, tokens = logits.argmax(-1).tolist(), 0, []
        while True:
            tokens.append(predicted[node])
            child = int(info.retrieve_next_token[row, node])
            while child >= 0 and int(tree[child]) != predicted[node]:
                child = int(info.retrieve_next_sibling[row, child])
            if child < 0:
                break
            node = child
        written.append(tokens)
    return written


@pytest.mark.parametrize(("nodes", "overlap"), [(3, True), (8, True), (8, False), (32, True)])
def test_drafts_change_no_token(monkeypatch: pytest.MonkeyPatch, nodes: int, overlap: bool) -> None:
    """Requests of two tenants that come, go and have the same ids; with overlap, results reach them a step late."""
    model, most, steps = _model(), 40, 0
    generator = torch.Generator().manual_seed(3)
    prompts = [torch.randint(1, _WORDS, (6,), generator=generator).tolist() for _ in range(3)]
    expected = [_plain(model, prompt, most) for prompt in prompts]
    with running_worker(monkeypatch, nodes, batch=3, disable_overlap_schedule=not overlap) as worker:
        accepted = []
        for turn in range(3):
            reqs = [
                request(f"{turn % 2}-{i}", prompt, most, draftwood_tenant=("acme", "other")[i % 2])
                for i, prompt in enumerate(prompts)
            ]
            texts = [[*prompt, answer[0]] for prompt, answer in zip(prompts, expected, strict=True)]
            latest = [[answer[0]] for answer in expected]
            begun = steps
            while min(len(text) for text in texts) < 6 + most:
                if not overlap:
                    for req, piece in zip(reqs, latest, strict=True):
                        req.output_ids.extend(piece)
                batch = prepared(worker, reqs, latest if overlap else None)
                assert batch.seq_lens.tolist() == [len(text) - 1 for text in texts]
                written = _verified(model, batch, texts, nodes)
                steps += 1
                for req, text, piece, was in zip(reqs, texts, written, latest, strict=True):
                    if overlap:
                        req.output_ids.extend(was)
                    text.extend(piece)
                latest = written
            accepted.append(steps - begun)
            for text, answer in zip(texts, expected, strict=True):
                assert text[6 : 6 + most] == answer
            for req, piece in zip(reqs, latest, strict=True):
                req.output_ids.extend(piece)
                finish(req, most)
            worker.ngram_corpus.erase_match_state([req.rid for req in reqs])
        assert worker.ngram_corpus.drafts is not None
        assert worker.ngram_corpus.drafts.failures == {}
        assert accepted[-1] < 20 < most  # later turns draft from what earlier ones wrote
