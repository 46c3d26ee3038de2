"""The losslessness audit: answers decoded again without drafting in idle time, and compared."""
