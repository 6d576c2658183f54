"""PromptDPSGD (Duan et al. 2023): training and serving of soft prompts and prefixes."""
