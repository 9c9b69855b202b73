"""The config: what to train. Frozen, checked when built, with every default written out."""
