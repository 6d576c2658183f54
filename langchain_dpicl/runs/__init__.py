"""What runs of all methods share: queries, generation, memos, tenants, receipts, retry wrappers."""
