"""Libraries that call OpenAI's API, in front of the real gateway and service: `python -m tests.callers`."""
