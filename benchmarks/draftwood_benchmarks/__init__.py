"""Measurements that users run: the demo, and `draftwood bench`."""
