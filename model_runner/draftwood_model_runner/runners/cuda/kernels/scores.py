"""Scores of the next token at each node of a draft tree: logits after masks, penalties and biases."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["first", "mask_words"])
def adjust_scores(
    logits,
    scores,
    first,
    row_sequences,
    row_masks,
    masks,
    row_nodes,
    parents,
    tokens,
    positions,
    unlocked_at,
    penalties,
    entry_offsets,
    entry_tokens,
    entry_counts,
    entry_biases,
    entry_flags,
    vocab,
    logit_stride,
    mask_words,
    BLOCK: tl.constexpr,
    ENTRIES: tl.constexpr,
):
    """Scores after masks, penalties and biases, at each node by its own prefix: one program for each row of scores.

    Args:
        logits: [first + row, vocab].
        scores: float32[row, vocab], out.
        first: the row of logits that the first row of scores is of.
        row_sequences: int32[row], -1 for rows that are chosen on the host.
        row_masks: int32[row], negative for none.
        masks: int32[mask, mask_words]: a bit for each token, set if it may follow.
        row_nodes: int32[first + row]: the token of the step that a row follows.
        parents: int32[token], the token of the step before each one in its tree; -1 for the root and what comes before.
        tokens, positions: int32[token].
        unlocked_at: int32[sequence], the first position where the output may end.
        penalties: float32[sequence, 3]: repetition, presence, frequency.
        entry_offsets: int32[sequence + 1], into the tokens that are not left as they are:
        entry_tokens, entry_counts, entry_biases, entry_flags: int32, int32, float32, int32[entry]; a count is of the
            output so far, flag 1 of a token seen in prompt or output, 2 of one that ends the output. All tokens of the
            draft are among them, if there are penalties.
    """
    row = tl.program_id(0).to(tl.int64)
    sequence = tl.load(row_sequences + row)
    if sequence < 0:
        return
    out = scores + row * vocab
    mask = tl.load(row_masks + row).to(tl.int64)
    for start in range(0, vocab, BLOCK):
        at = start + tl.arange(0, BLOCK)
        values = tl.load(logits + (first + row) * logit_stride + at, mask=at < vocab, other=0.0).to(tl.float32)
        if mask >= 0:
            words = tl.load(masks + mask * mask_words + at // 32, mask=at < vocab, other=0)
            values = tl.where(((words >> (at % 32)) & 1) != 0, values, float("-inf"))
        tl.store(out + at, values, mask=at < vocab)
    tl.debug_barrier()
    repetition = tl.load(penalties + sequence * 3)
    presence = tl.load(penalties + sequence * 3 + 1)
    frequency = tl.load(penalties + sequence * 3 + 2)
    node = tl.load(row_nodes + first + row)
    locked = tl.load(positions + node) + 1 < tl.load(unlocked_at + sequence)
    end = tl.load(entry_offsets + sequence + 1)
    for start in range(tl.load(entry_offsets + sequence), end, ENTRIES):
        at = start + tl.arange(0, ENTRIES)
        there = at < end
        token = tl.load(entry_tokens + at, mask=there, other=-1)
        count = tl.load(entry_counts + at, mask=there, other=0)
        flags = tl.load(entry_flags + at, mask=there, other=0)
        ancestor = node
        parent = tl.load(parents + ancestor)
        while parent >= 0:
            count += (tl.load(tokens + ancestor) == token).to(tl.int32)
            ancestor = parent
            parent = tl.load(parents + ancestor)
        value = tl.load(out + token, mask=there, other=0.0)
        seen = ((flags & 1) != 0) | (count > 0)
        value = tl.where(seen, tl.where(value < 0, value * repetition, tl.div_rn(value, repetition)), value)
        value -= tl.where(count > 0, presence, 0.0) + frequency * count.to(tl.float32)
        value += tl.load(entry_biases + at, mask=there, other=0.0)
        value = tl.where(locked & ((flags & 2) != 0), float("-inf"), value)
        tl.store(out + token, value, mask=there)
