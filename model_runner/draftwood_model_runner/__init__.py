"""Sequences in, tokens out: loads a model, drafts and verifies trees on it. No gRPC, no Redis."""
