"""Experiments on the live requests of a server: guardrails and reports over the counts of all processes.

What is concluded is in `draftwood_service.experiments.statistics`.
"""
