"""Experiments on live requests: who is in which arm, counts that all servers share, guardrails, reports.

What is counted and concluded is in `draftwood_service.experiments`.
"""
