"""The services of gRPC itself: health and reflection."""
