"""What one caller's attack costs the others."""
