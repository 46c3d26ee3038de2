"""vLLM as the engine: `core` alone imports it."""
