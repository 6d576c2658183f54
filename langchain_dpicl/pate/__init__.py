"""PromptPATE (Duan et al. 2023): teachers, labelling, pools, example selectors."""
