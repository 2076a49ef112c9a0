"""From a variant to a cubin and a record, in worker processes, with a cache. Knows no GPU."""
