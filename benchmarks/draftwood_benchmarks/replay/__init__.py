"""`draftwood bench replay` and `draftwood bench memory`: strategies on recorded outputs, without a model."""
