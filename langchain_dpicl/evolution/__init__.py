"""Private evolution: texts that are chosen by private nearest-neighbour votes (Xie et al. 2024)."""
