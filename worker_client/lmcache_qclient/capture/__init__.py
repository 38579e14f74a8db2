"""From a forward pass's rows to chunks in the ring: who owns which row, and what became of every token."""
