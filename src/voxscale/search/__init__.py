"""Experiment parallelism: one search with many runs, each an ordinary run folder."""
