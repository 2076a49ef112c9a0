"""Which variants there are for a problem, and how long each is estimated to take. Needs no GPU and no compiler."""
