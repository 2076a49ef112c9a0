"""Whether an archive is what it says: digests, records, launches and tables. Needs no GPU."""
