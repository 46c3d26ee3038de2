"""The memories in this process: their records, and the strategies that requests draft with."""
