"""Trained runs for others: as a MONAI bundle, which runs without voxscale."""
