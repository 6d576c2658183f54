"""Free-form answers by private votes over candidates, keywords or embeddings (Wu et al. 2023)."""
