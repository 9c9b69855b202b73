"""From files to batches: cases, formats, volumes, store, sampler, augment, loader."""
