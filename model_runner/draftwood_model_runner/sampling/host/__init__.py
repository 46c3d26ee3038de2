"""What the host does with rows of logits."""
