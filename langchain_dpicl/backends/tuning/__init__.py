"""Trains prompts of local models: rows of gradients, one per unit. All but `tasks` need torch; knows no privacy."""
