/* How often something was launched. */

#ifndef RUNTIME_COUNTER_H
#define RUNTIME_COUNTER_H

#include "native.h"

typedef struct {
    PyObject_HEAD
    uint64_t count; /* changed with the GIL held, so exact */
} Counter;

extern PyTypeObject *counter_type;

#endif
