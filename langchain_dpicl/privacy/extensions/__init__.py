"""What stands beside the core: further samplers, sums and mechanisms, each with its proof page, and further shares of a
budget. The core loads one only where a plan names it.
"""
