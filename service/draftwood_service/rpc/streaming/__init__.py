"""Sends the messages of an answer: how they are written, shaped against traffic analysis, and ended."""
