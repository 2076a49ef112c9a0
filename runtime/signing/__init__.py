"""Who signed an archive: the statement, its envelope, the keys that a deployment trusts, and the check of all three."""
