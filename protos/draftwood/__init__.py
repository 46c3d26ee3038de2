"""Draftwood's wire protocol: generated messages and stubs."""
