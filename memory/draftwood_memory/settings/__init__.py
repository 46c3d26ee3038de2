"""What a server and plug-ins of engines are set up with: their settings, and the memory that these name."""
