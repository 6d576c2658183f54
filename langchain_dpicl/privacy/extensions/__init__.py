"""Further samplers, sums and mechanisms, each with its proof page; the core loads one only where a plan names it."""
