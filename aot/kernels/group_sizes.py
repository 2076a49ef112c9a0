"""How many groups kernels that find the group of a tile have room for (`groups`). Imports no compiler."""

MOST_GROUPS = 512
GROUPS_BYTES = 2 * (MOST_GROUPS + 4) * 4  # of shared memory: see `groups.Groups`
