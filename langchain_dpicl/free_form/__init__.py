"""Free-form answers from a private release of embeddings or keywords (Wu et al. 2024)."""
