"""What has been released: demonstrations, counts, documents, pools, soft prompts, and their files.

Reads no private record.
"""
