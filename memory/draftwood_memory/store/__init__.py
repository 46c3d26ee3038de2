"""The store: connections to Redis or Valkey, the embedded server, and the keys, hashes and streams of memories."""
