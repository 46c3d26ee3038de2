"""HTTP itself: connections and their bounds, what of a request is not its fields, errors as answers."""
