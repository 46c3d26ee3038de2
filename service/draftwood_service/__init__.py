"""The gRPC service around the engine: requests in, streams of events out. No torch and no drafting in here."""
