"""Sizes of blocks and parts. Those of attention were tried on an H200, the others were chosen by reasoning."""

from __future__ import annotations

WORD = 64
"""Nodes of an ancestor word, and entries of a KV cache that a program of attention reads at a time."""
LEAST_RUN, LEAST_RUN_OF_MANY = 2 * WORD, 4 * WORD
"""Entries that a part of attention with few rows reads at least, and one with many, whose sums take as much memory
traffic as 256 entries: fewer are not worth a part of their own."""
MERGED_PARTS = 16
"""Parts that a merge reads at a time. One after the other, each took 0.7 us on an H200."""
EXACT_RUN = 8 * WORD
"""Entries that a part of attention reads in exact mode. Fewer would leave more sums to merge."""
LINEAR_BLOCK = (64, 64, 64)
"""Of exact linear layers: rows and columns of a program, and numbers that it multiplies at a time."""
SILU_BLOCK = 1024
"""Columns of a program that multiplies gate and up of an MLP."""
SAMPLING_BLOCK, SAMPLING_ENTRIES = 1024, 128
"""Scores that a program reads at a time when it chooses a token, and tokens with rules of their own."""
TOP_BLOCK = 4096
"""Logits among which a program finds the most probable ones."""
CONVOLUTION_BLOCK = 512
"""Channels of a program of a short convolution."""
STATE_BLOCK = 4096
"""Numbers of a recurrent layer's state that a program keeps in registers."""
