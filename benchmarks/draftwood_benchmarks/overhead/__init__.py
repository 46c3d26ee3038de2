"""`draftwood bench overhead`: what the host works in a decoding step, measured with a runner that costs nothing."""
