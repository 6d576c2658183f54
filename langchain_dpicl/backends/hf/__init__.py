"""The parts of the local Hugging Face engine; `backends.huggingface` is their public face."""
