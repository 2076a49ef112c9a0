"""How large what comes out of a file may be, and what a launch may ask of a GPU: one table for every reader.

A file is checked against these before memory or time is spent on what it declares, so that what it can cost grows with
its size. `native/limits.h` has those that native code needs; `tests/test_limits.py` holds the two together.
"Found" is the most that archives of all manifests in `manifests/` and of `tests/data/coverage.yaml` have.
"""

# --- the file ---
MAX_INDEX_BYTES = 16 << 20  # decompressed; about 90,000 functions
MAX_INDEX_HEAD_BYTES = 256 << 10  # the JSON it begins with; about 4,000 blocks
MAX_BLOCK_BYTES = 32 << 20  # decompressed; `aot.pack.write` writes 8 MiB, but for one blob that has more
MAX_RECORDS_BLOCK_BYTES = 1 << 20  # the same of a block of records, and so of a record; the largest found has 6 KB
# All blocks together may decompress to this many times the file, and to the allowance besides. Found: 29.
MAX_EXPANSION = 256
EXPANSION_ALLOWANCE_BYTES = 1 << 20
MAX_INDEX_EXPANSION = 16  # the same of the index, most of which is digests; found: 2.6
INDEX_ALLOWANCE_BYTES = 64 << 10

# --- a signature and the keys for it ---
MAX_ENVELOPE_BYTES = 1 << 20  # a detached signature; most of it is the provenance
MAX_SIGNATURES = 16  # of one envelope
MAX_KEY_BYTES = 16 << 10
MAX_POLICY_BYTES = 1 << 20

# --- a JSON document ---
MAX_JSON_VALUES = 1_000_000  # about: the commas and opening brackets in it, those in strings too
MAX_JSON_DEPTH = 254  # what orjson writes at most
MAX_NAME_CHARACTERS = 255  # of a function or a table

# --- a table of an operation ---
MAX_TABLE_ENTRIES = 8_192  # found: 147
MAX_TABLE_RANGES = 65_536  # of all entries together, those for equal bits too; found: 3,424
MAX_GPU_MULTIPROCESSORS = 65_536  # found: 148
MAX_GPU_MEMORY_GBPS = 1_000_000  # found: 8,000
MAX_CALL_FUNCTIONS = 32  # that are tried for a call, each of which may have to be read and loaded
MAX_EXTENT = 2**31 - 1  # that a signature has; strides of more than 32 bits are the record's matter

# --- a cost program ---
MAX_COST_NODES = 16_384  # of all functions of a form together; each evaluation takes about 1 ns a node
MAX_COST_RESULTS = 128  # functions of a form
MAX_UNIVERSAL_FORMS = 512  # of the table "universal"; found: 22
MAX_CHECKED_GPUS = 64  # kinds of GPU on which the functions of that table were checked
MAX_UNIVERSAL_NODES = 1 << 18  # of all its cost programs together; found: 33,364

# --- a record ---
MAX_ARGUMENTS = 64  # those inside tuples too; found: 9
MAX_ARGUMENT_DEPTH = 4  # of tuples in tuples
MAX_RANK = 16
MAX_SYMBOLS = 128  # found: 12
MAX_KERNELS = 16  # found: 1; other libraries' functions have up to 3
MAX_WORKSPACE_BYTES = 1 << 30  # for each cluster
MAX_SHARED_WORKSPACE_BYTES = 64 << 20  # that the captures of a library share, where they do; found: 11 MB for a launch

# --- a launch program ---
MAX_INPUTS = 256  # integers; found: 13
MAX_POINTERS = 64  # found: 7
MAX_NODES = 2_048  # found: 158; other libraries' functions have up to 323
MAX_LOOPS = 32  # found: 2
MAX_LOOP_VARIABLES = 16  # found: 2
MAX_LOOP_ROUNDS = 256  # found: 64, the bits of an integer
# Of all loops together: rounds, times the loop's nodes and variables and one. Found: 768.
MAX_LOOP_STEPS = 16_384
MAX_LAUNCHES = 8  # found: 1; other libraries' functions have up to 3
MAX_PARAMETERS = 256  # of a launch; found: 27

# What `preload` may evaluate to see what fits, in steps: a program's nodes, rounds of loops and words, and those of the
# call, twice for each function of an entry. There is an allowance, more for each byte of the archives, and for each M
# that the caller asks for. Found: 295,943, in 700,140 bytes; 975 of a program.
PRELOAD_ALLOWANCE_STEPS = 1 << 19
PRELOAD_STEPS_OF_A_BYTE = 4
PRELOAD_STEPS_OF_A_TOKEN = 4_096
STEPS_OF_A_CALL = 256

# --- a launch ---
# Kernel parameters: at most 32,764 bytes on compute capability 7.0 and later (CUDA C++ programming guide, 10.1).
MAX_PARAMETER_BYTES = 32_764
MAX_GRID = (2**31 - 1, 65_535, 65_535)
MAX_BLOCK_THREADS = 1_024
# The most a block may opt in to on any GPU so far is 327 KiB; anything above 384 KiB is a damaged record.
MAX_SHARED_BYTES = 384 << 10
