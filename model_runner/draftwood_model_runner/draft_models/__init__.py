"""Models that draft for another: smaller ones of the same vocabulary, and heads on the other's hidden states."""
