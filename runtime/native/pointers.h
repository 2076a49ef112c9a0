/* What the addresses of a call's tensors must be, which runtime/program/pointers.py defines and computes. */

#ifndef RUNTIME_POINTERS_H
#define RUNTIME_POINTERS_H

#include "native.h"

enum { MOST_APART = 32 };

typedef struct {
    uint32_t tensors, pairs;
    uint64_t misaligned[MOST_TENSORS], sizes[MOST_TENSORS];
    uint8_t apart[MOST_APART][2];
} PointerChecks;

/* Read a `PointerChecks` of Python: 1; 0 if there is no room for it, or -1 with an exception set if it is none. */
int read_checks(PyObject *object, PointerChecks *out);

/* Whether a call's tensors may be at these addresses, of which there are as many as `tensors`. */
static inline int pointers_fit(const PointerChecks *checks, const uint64_t *pointers) {
    for (uint32_t i = 0; i < checks->tensors; i++)
        if (pointers[i] == 0 || pointers[i] & checks->misaligned[i]) return 0;
    for (uint32_t i = 0; i < checks->pairs; i++) {
        uint32_t x = checks->apart[i][0], y = checks->apart[i][1];
        if (pointers[x] < pointers[y] + checks->sizes[y] && pointers[y] < pointers[x] + checks->sizes[x]) return 0;
    }
    return 1;
}

#endif
