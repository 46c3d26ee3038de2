"""Values of this client to messages of the protocol, and back. No I/O."""
