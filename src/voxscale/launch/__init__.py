"""Launchers: each makes or opens the run folder, starts the same worker, and reads the outcome from the folder."""
