/* Those of runtime/limits.py that native code needs; tests/test_limits.py holds the two together. */

#ifndef RUNTIME_LIMITS_H
#define RUNTIME_LIMITS_H

enum {
    MAX_INPUTS = 256,
    MAX_POINTERS = 64,
    MAX_NODES = 2048,
    MAX_LOOPS = 32,
    MAX_LOOP_VARIABLES = 16,
    MAX_LOOP_ROUNDS = 256,
    MAX_LOOP_STEPS = 16384,
    MAX_LAUNCHES = 8,
    MAX_PARAMETERS = 256,
    MAX_PARAMETER_BYTES = 32764,
    MAX_GRID_X = 2147483647,
    MAX_GRID_Y = 65535,
    MAX_GRID_Z = 65535,
    MAX_BLOCK_THREADS = 1024,
    MAX_SHARED_BYTES = 384 * 1024,
    MAX_COST_NODES = 16384,
    MAX_COST_RESULTS = 128,
};

#endif
