"""What the machine, or its container, has for a runner: CPUs, and memory for keys and values."""
