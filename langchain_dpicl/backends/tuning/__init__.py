"""Trains prompts of local models: rows of gradients, one per unit."""
