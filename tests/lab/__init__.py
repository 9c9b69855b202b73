"""A real cluster on one machine for tests: SLURM with several nodes, and container runtimes."""
