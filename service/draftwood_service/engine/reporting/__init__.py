"""The report on its work that the engine's process sends to the service once a second."""
