"""The rooms of the local engine, one task each; `backends.huggingface` is their face. All but `loading` need torch."""
