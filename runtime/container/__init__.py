"""The archive file: blocks, digests, index and canonical JSON. Knows nothing of what records and tables mean."""
