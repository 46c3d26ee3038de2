"""`draftwood bench leak`: what sizes and times of packets tell of an answer."""
