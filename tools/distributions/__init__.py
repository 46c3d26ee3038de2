"""What the distributions are locked to, and what they are installed beside."""
