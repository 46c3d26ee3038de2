"""A/B tests of drafting strategies: what the counts allow to conclude.

Pure functions and values over numpy: nothing in here knows of gRPC, storage, the engine or the rest of the service.
`docs/experiments.md` has the method with its assumptions and references.
"""
