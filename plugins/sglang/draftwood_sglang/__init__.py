"""Draftwood's drafts inside SGLang: `sglang serve MODEL --speculative-algorithm DRAFTWOOD`."""
