"""The small language model that comes with the package, for demos and tests; numpy only."""
