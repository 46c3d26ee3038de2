"""Which of two drafts of a row is verified, and what both would have had accepted; see `device.choice`."""

from __future__ import annotations

import triton
import triton.language as tl

from draftwood_strategies.device import choice as numbers

HEADER: tl.constexpr = tl.constexpr(numbers.HEADER)
START: tl.constexpr = tl.constexpr(numbers.START)
SIZE: tl.constexpr = tl.constexpr(numbers.SIZE)
CELL: tl.constexpr = tl.constexpr(numbers.CELL)
AGREED: tl.constexpr = tl.constexpr(numbers.AGREED)
COUNTED: tl.constexpr = tl.constexpr(numbers.COUNTED)
BINS: tl.constexpr = tl.constexpr(numbers.BINS)
BINS_PER_LOG: tl.constexpr = tl.constexpr(numbers.BINS_PER_LOG)
PRIOR_COUNT: tl.constexpr = tl.constexpr(numbers.PRIOR_COUNT)
PRIOR_OF_OURS: tl.constexpr = tl.constexpr(numbers.PRIOR_COUNT * numbers.PRIOR_PROMISE)
PRIOR_LENGTH: tl.constexpr = tl.constexpr(numbers.PRIOR_LENGTH)


@triton.jit
def grade(table, pending, index, learns, texts, lengths, width, PLACES: tl.constexpr):
    """A row whose two kept drafts have been written past: adds how many tokens of each its text has."""
    state = tl.cast(tl.load(index + tl.program_id(0)), tl.int64)
    kept = state * (HEADER + 2 * PLACES)
    start = tl.load(pending + kept + START)
    size = tl.load(pending + kept + SIZE)
    agreed = tl.load(pending + kept + AGREED)
    ready = (start >= 0) & (tl.load(lengths + state) - start >= size)
    place = tl.arange(0, PLACES)
    inside = place < tl.where(ready, size, 0)
    text = tl.load(texts + state * width + start + place, mask=inside, other=-1)
    theirs = tl.load(pending + kept + HEADER + place)
    ours = tl.load(pending + kept + HEADER + PLACES + place)
    length_theirs = tl.min(tl.where(inside & (theirs == text), PLACES, place), axis=0)
    length_ours = tl.min(tl.where(inside & (ours == text), PLACES, place), axis=0)
    counted = tl.load(pending + kept + COUNTED)
    lane = tl.arange(0, 4)
    of_theirs = tl.where(lane == 0, 1, tl.maximum(length_theirs - agreed, 0)) * counted
    of_ours = tl.where(lane == 2, 1, tl.maximum(length_ours - agreed, 0))
    learned = ready & (tl.load(learns + state) != 0)
    cell = tl.load(pending + kept + CELL)
    amounts = tl.where(lane < 2, of_theirs, of_ours)
    tl.atomic_add(table + cell * 4 + lane, amounts, mask=lane < tl.where(learned, 4, 0))
    tl.store(pending + kept + START, tl.where(ready, -1, start))


@triton.jit(do_not_specialize=["size"])
def choose(
    out,
    taken,
    table,
    pending,
    index,
    slots,
    lengths,
    temperatures,
    theirs,
    ours,
    scores,
    counts,
    size,
    K: tl.constexpr,
    PLACES: tl.constexpr,
    PROBABILISTIC: tl.constexpr,
):
    """The row's draft, and how many of its tokens are ours; keeps both if none are kept."""
    row = tl.program_id(0)
    state = tl.cast(tl.load(index + row), tl.int64)
    slot = tl.load(slots + state)
    place = tl.arange(0, PLACES)
    given = place < K
    token_theirs = tl.cast(tl.load(theirs + row * K + place, mask=given, other=-1), tl.int32)
    token_ours = tl.cast(tl.load(ours + row * K + place, mask=given, other=-1), tl.int32)
    count = tl.minimum(tl.load(counts + row), size)
    drafted = place < count
    score = tl.load(scores + row * K + place, mask=drafted, other=0.0)
    sampled = tl.load(temperatures + state) > 0
    # Tokens that were drawn, and are verified by their probabilities, must have no part in the choice.
    blind = sampled & PROBABILISTIC
    same = tl.min(tl.where(drafted & (token_theirs == token_ours), PLACES, place), axis=0)
    agreed = tl.where(blind, 0, same)
    before = tl.sum(tl.where(place == agreed - 1, score, 0.0), axis=0)
    survival = tl.where(agreed > 0, tl.maximum(before, 1e-6), 1.0)
    expected = tl.sum(tl.where(place >= agreed, score, 0.0), axis=0) / survival
    bin_ = tl.minimum(tl.cast(tl.floor(tl.log(expected * 2.0 + 1.0) * BINS_PER_LOG), tl.int32), BINS - 1)
    cell = ((slot * 2 + tl.cast(sampled, tl.int32)) * 2 + tl.cast(agreed > 0, tl.int32)) * BINS + bin_
    contested = (slot >= 0) & (agreed < count)
    cell = tl.where(contested, cell, 0)
    count_theirs = tl.cast(tl.load(table + cell * 4), tl.float32)
    sum_theirs = tl.cast(tl.load(table + cell * 4 + 1), tl.float32)
    count_ours = tl.cast(tl.load(table + cell * 4 + 2), tl.float32)
    sum_ours = tl.cast(tl.load(table + cell * 4 + 3), tl.float32)
    usual = tl.minimum(tl.cast(size - agreed, tl.float32), PRIOR_LENGTH)
    mean_theirs = (sum_theirs + usual * PRIOR_COUNT) / (count_theirs + PRIOR_COUNT)
    mean_ours = (sum_ours + expected * PRIOR_OF_OURS) / (count_ours + PRIOR_COUNT)
    take = contested & (mean_ours > mean_theirs)
    chosen = tl.where(place < tl.where(take, count, 0), token_ours, token_theirs)
    tl.store(out + row * K + place, tl.cast(chosen, tl.int64), mask=given)
    tl.store(taken + row, tl.where(take, count, 0))

    kept = state * (HEADER + 2 * PLACES)
    keeps = contested & (tl.load(pending + kept + START) < 0)
    counted = tl.where(blind & take, 0, 1)
    lane = tl.arange(0, HEADER)
    header = tl.where(lane == START, tl.load(lengths + state), tl.where(lane == SIZE, size, cell))
    header = tl.where(lane == AGREED, agreed, tl.where(lane == COUNTED, counted, header))
    tl.store(pending + kept + lane, header, mask=lane < tl.where(keeps, HEADER, 0))
    ahead, written = kept + HEADER + place, place < tl.where(keeps, PLACES, 0)
    tl.store(pending + ahead, tl.where(place < size, token_theirs, -1), mask=written)
    tl.store(pending + ahead + PLACES, tl.where(drafted, token_ours, -1), mask=written)
