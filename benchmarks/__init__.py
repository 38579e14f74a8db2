"""Ratios, measured in one run on one machine: ours against the memory-copy limit, with capture against without."""
