"""Work on several threads, and how many of them the machine has CPUs for."""
