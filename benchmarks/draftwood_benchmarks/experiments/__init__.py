"""`draftwood bench experiments`, the error rates of our A/B tests; and `draftwood experiment replay`."""
