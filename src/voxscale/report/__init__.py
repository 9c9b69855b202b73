"""What ran and how it went, read from run folders alone."""
