"""What the engine's process tells the service of its work once a second."""
