"""Arithmetic before anything runs: devices, batches, steps."""
