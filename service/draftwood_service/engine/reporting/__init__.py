"""What the service knows of its engine: its report once a second, whether it hangs, and how it is restarted."""
