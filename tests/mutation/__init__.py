"""Changes of the vault's source, one at a time, each of which has to turn a test red."""
