"""Multi-head latent attention: latents are kept in place of keys and values, and answers are those of `generate`."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from draftwood_model_runner.runners.base import KVShape
from draftwood_model_runner.runners.torch import latents
from draftwood_model_runner.runners.torch.latents import LatentProjection, keep_expanded, keep_latents
from draftwood_model_runner.runners.torch.probe import probe
from tests.model_runner.families import torch_factory
from tests.model_runner.small_models import tiny_attention
from tests.model_runner.test_hybrids import assert_lossless, served


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("absorbed", [True, False])
@pytest.mark.parametrize("kind", ["deepseek_v2", "deepseek_v3"])
def test_two_hundred_random_requests(kind: str, absorbed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    assert set(torch_factory(served(kind)).layout.shapes) == {KVShape(1, 32 + 8, 0)}
    monkeypatch.setattr(LatentProjection, "absorbs", lambda *_: absorbed)
    assert_lossless(kind, range(40))


@torch.inference_mode()
def test_both_forms_compute_the_same_in_any_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    module = tiny_attention("deepseek_v3", 128, 128).model.layers[0].self_attn
    projection = LatentProjection(module)
    query, entries = torch.randn(4, 7, 24), torch.randn(30, 40)
    mask = torch.zeros(7, 30).masked_fill_(torch.rand(7, 30) < 0.3, -torch.inf)
    keys, values = projection.expanded(entries[None])
    weights = torch.softmax(query @ keys.transpose(1, 2) * 0.3 + mask, -1)
    expected = (weights @ values).transpose(0, 1)
    for scores in (1, 500, 1 << 24):
        monkeypatch.setattr(latents, "_SCORES", scores)
        torch.testing.assert_close(projection.attend(query, entries, mask, 0.3), expected, rtol=1e-4, atol=1e-4)


def test_few_queries_attend_to_latents_and_many_to_what_they_expand_to() -> None:
    projection = LatentProjection(tiny_attention("deepseek_v3", 128, 128).model.layers[0].self_attn)
    assert projection.absorbs(1, 1000)
    assert projection.absorbs(12, 1000)
    assert not projection.absorbs(13, 1000)
    assert projection.absorbs(33, 1 << 20), "what would be expanded takes too much memory"


def test_a_module_that_does_more_than_project_keeps_its_keys_and_values(monkeypatch: pytest.MonkeyPatch) -> None:
    module = tiny_attention("deepseek_v3", 128, 128)
    kind: Any = type(module.model.layers[0].self_attn)
    original = kind.expand_kv
    monkeypatch.setattr(kind, "expand_kv", lambda self, latent, rope: original(self, latent.abs(), rope))
    with pytest.raises(ValueError, match="no projection"):
        keep_latents(module)
    layout = probe(module, exact=False, max_context=128)
    assert set(layout.shapes) == {KVShape(4, 24, 16)}


def test_the_latents_can_be_taken_back() -> None:
    module = tiny_attention("deepseek_v2", 128, 128)
    ids = torch.arange(20)[None]
    with torch.inference_mode():
        expected = module(input_ids=ids).logits
        assert keep_latents(module)
        keep_expanded(module)
        assert torch.equal(module(input_ids=ids).logits, expected)


def test_exact_mode_keeps_keys_and_values() -> None:
    module = tiny_attention("deepseek_v3", 128, 256)
    layout = probe(module, exact=True, max_context=256)
    kept = {KVShape(4, 24, 16)} if layout.exact else {KVShape(1, 32 + 8, 0)}
    assert set(layout.shapes) == kept
