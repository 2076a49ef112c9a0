// What `host_calls.py` gives native code in place of torch and the driver: tensors that are read without Python's
// interpreter, and a launch that does nothing. An object's attribute `dl` has the address of its DLTensor.
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>

typedef struct {
    void *data;
    int32_t device_type, device_id, ndim;
    uint8_t code, bits;
    uint16_t lanes;
    int64_t *shape, *strides;
    uint64_t byte_offset;
} Tensor;

typedef struct {
    uint32_t major, minor;
    void *previous, *allocate, *from_object, *to_object;
    int (*view)(PyObject *, Tensor *);
    int (*current_stream)(int32_t, int32_t, void **);
} ExchangeApi;

static PyObject *name;

static int view(PyObject *object, Tensor *out)
{
    PyObject *address = PyObject_GetAttr(object, name);
    if (address == NULL)
        return -1;
    *out = *(Tensor *)PyLong_AsVoidPtr(address);
    Py_DECREF(address);
    return 0;
}

static int current_stream(int32_t type, int32_t device, void **stream)
{
    *stream = (void *)0x5000;
    return 0;
}

static ExchangeApi api = {1, 3, NULL, NULL, NULL, NULL, view, current_stream};

int launch(const void *config, void *function, void **parameters, void **extra)
{
    return 0;
}

PyObject *capsule(void)
{
    name = PyUnicode_InternFromString("dl");
    return name == NULL ? NULL : PyCapsule_New(&api, "dlpack_exchange_api", NULL);
}
