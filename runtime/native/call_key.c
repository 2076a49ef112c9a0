/* Tensors are read through the exchange API of DLPack 1.3 that their type offers (__dlpack_c_exchange_api__), so this
   is built without the framework that they are of. */

#include "call_key.h"

static int is_tensor(PyObject *types, PyObject *object) {
    Py_ssize_t count = PyTuple_Size(types);
    for (Py_ssize_t i = 0; i < count; i++)
        if ((PyObject *)Py_TYPE(object) == PyTuple_GetItem(types, i)) return 1;
    return 0;
}

/* A type that DLPack calls by another's name: it says of torch.int4, two to a unit, what it says of torch.int8. */
static int shares_its_name(const DLTensor *t) { return t->dtype.code <= DLPACK_UNSIGNED && t->dtype.bits == 8; }

int read_call(const ExchangeApi *api, PyObject *types, int64_t tag, PyObject *const *objects, Py_ssize_t count,
              CallKey *found) {
    int64_t *word = found->key;
    uint64_t hash = 0;
    found->tensors = 0;
    *word++ = tag;
    if (count > MOST_TENSORS) return 0;
    for (Py_ssize_t i = 0; i < count; i++) {
        DLTensor *t = &found->tensor[found->tensors];
        if (objects[i] == Py_None) {
            *word++ = -1;
            continue;
        }
        if (!is_tensor(types, objects[i])) return 0;
        if (api->view(objects[i], t) != 0) {
            PyErr_Clear(); /* Python's path says what is wrong */
            return 0;
        }
        if (t->device.type != DLPACK_CUDA || t->ndim < 0 || t->ndim > MOST_DIMS || (t->ndim && t->strides == NULL))
            return 0;
        found->tensors++;
        *word++ = (int64_t)t->dtype.code << 32 | (int64_t)t->dtype.bits << 16 | t->dtype.lanes;
        if (shares_its_name(t)) {
            PyObject *dtype = PyObject_GetAttrString(objects[i], "dtype"); /* which is never another object */
            if (dtype == NULL) {
                PyErr_Clear();
                return 0;
            }
            *word++ = (int64_t)(uintptr_t)dtype;
            Py_DECREF(dtype);
        }
        *word++ = t->device.id;
        *word++ = t->ndim;
        for (int32_t j = 0; j < t->ndim; j++) *word++ = t->shape[j];
        for (int32_t j = 0; j < t->ndim; j++) *word++ = t->strides[j];
    }
    found->words = (uint32_t)(word - found->key);
    for (uint32_t i = 0; i < found->words; i++) {
        hash = (hash ^ (uint64_t)found->key[i]) * 0x9E3779B97F4A7C15u;
        hash ^= hash >> 29;
    }
    found->hash = hash;
    return 1;
}
