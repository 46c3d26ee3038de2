"""What sizes and times of packets tell of an answer."""
