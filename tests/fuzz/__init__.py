"""Malformed input by the thousand, seeded: `make fuzz` runs it all and prints a table, the tests a few of each."""
