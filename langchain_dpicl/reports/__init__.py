"""Reports, their rendering and their verification. Spends nothing and reads no record."""
