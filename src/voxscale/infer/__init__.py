"""Whole volumes: sliding windows, per-case metrics, the table of cases."""
