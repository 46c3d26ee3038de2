"""Changes of a converted model before it is compiled."""
