"""Faults by the hundred, seeded: `make chaos` runs them all and prints a table, the tests a few of each."""
