"""What the benchmarks share: models, prompts, a service to measure, reports."""
