"""The API of OpenAI over HTTP, as a client of a Draftwood service. Holds no state, loads no model."""
