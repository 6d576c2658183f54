"""The local Hugging Face engine, `HuggingFaceBackend`, and its parts."""
