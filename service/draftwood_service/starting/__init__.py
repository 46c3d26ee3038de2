"""What must hold before a server starts: a free address, and packages for what it is asked to do."""
