"""Experiments on live requests: their definition, who is in which arm, and counts that all processes share.

What is concluded from the counts is in the service.
"""
