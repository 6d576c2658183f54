"""Few-shot generation (Tang et al. 2023; Bhusal et al. 2025): plan, decoding, grammars, synthesizer."""
