/* A call's tensors, as numbers: the key under which a plan for it is kept, and where the tensors are. */

#ifndef RUNTIME_CALL_KEY_H
#define RUNTIME_CALL_KEY_H

#include "native.h"

/* The ABI of dlpack.h 1.3. */
typedef struct {
    void *data;
    struct { int32_t type, id; } device;
    int32_t ndim;
    struct { uint8_t code, bits; uint16_t lanes; } dtype;
    int64_t *shape, *strides;
    uint64_t byte_offset;
} DLTensor;

typedef struct {
    struct { uint32_t major, minor; } version;
    void *previous;
    void *allocate, *from_object, *to_object;
    int (*view)(void *object, DLTensor *out);
    int (*current_stream)(int32_t device_type, int32_t device, void **stream);
} ExchangeApi;

enum { DLPACK_MAJOR = 1, DLPACK_CUDA = 2, DLPACK_UNSIGNED = 1 /* and below it signed integers */ };

enum { MOST_DIMS = 5, WORDS_OF_TENSOR = 4 + 2 * MOST_DIMS, MOST_WORDS = 1 + MOST_TENSORS * WORDS_OF_TENSOR };

typedef struct {
    DLTensor tensor[MOST_TENSORS]; /* those that are given, in order; their shapes belong to them */
    uint32_t tensors, words;
    uint64_t hash;
    int64_t key[MOST_WORDS];
} CallKey;

/* Read a call's `count` objects, None or tensors of exactly one of these types, whose exchange API this is; 0 if they
   are no such, or of more dimensions than there is room for. `tag` stands for all that the call says in words. */
int read_call(const ExchangeApi *api, PyObject *types, int64_t tag, PyObject *const *objects, Py_ssize_t count,
              CallKey *found);

static inline uint64_t address_of(const DLTensor *t) { return (uint64_t)(uintptr_t)t->data + t->byte_offset; }

#endif
