/* A launch that was prepared: all but pointers and stream. */

#ifndef RUNTIME_LAUNCH_H
#define RUNTIME_LAUNCH_H

#include "native.h"

/* The ABI of cuda.h. */
typedef struct {
    uint32_t grid[3], block[3], shared_bytes;
    void *stream;
    const void *attributes;
    uint32_t count;
} Config; /* CUlaunchConfig */

enum { ATTRIBUTE_BYTES = 72, ATTRIBUTE_WORDS = 16 }; /* CUlaunchAttribute: an id, a pad, 64 bytes of value */

typedef int (*LaunchKernel)(const Config *, void *function, void **parameters, void **extra);

enum { MOST_BYTES = 4096, MOST_PARAMETERS = 32, MOST_ATTRIBUTES = 4, ALIGNMENT = 64 };

typedef struct { uint32_t offset, pointer; uint64_t addend, mask; } Slot;

typedef struct {
    PyObject_VAR_HEAD
    PyObject *failed; /* called with this, its grid, block and shared bytes, the pointers, the stream and the CUresult */
    PyObject *weakrefs; /* who would unload the kernel sees by one whether a call still holds this */
    LaunchKernel call;
    void *function;
    Config config;
    uint32_t attributes[MOST_ATTRIBUTES][ATTRIBUTE_BYTES / 4];
    uint32_t size, parameters, slots, pointers;
    Slot *slot; /* these and what is below are in `rest` */
    uint32_t *offset; /* of each parameter */
    unsigned char *template; /* size */
    uint64_t rest[];
} Launch;

extern PyTypeObject *launch_type;

/* Launch with as many pointers as there are: 0, or -1 with an exception set, which is what `failed` raised. Any number
   of threads may be here. */
int launch_or_fail(Launch *self, const uint64_t *pointers, uint64_t stream);

#endif
