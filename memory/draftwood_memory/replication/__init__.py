"""Keeps the memories of this process and the store's alike: a thread that loads, sends and follows them."""
