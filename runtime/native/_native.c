/* The module of native code: its parts, and what is too small to be one.

   Optional: where this was not built, Python does the same. Built against Python's stable ABI, and against neither
   torch nor CUDA. */

#include "native.h"

enum { INTERFACE = 11 }; /* that of runtime/native/__init__.py */
enum { MOST_ASKED = 256, INVALID_VALUE = 1 }; /* parameters of a kernel; of CUresult */

typedef int (*GetParameter)(void *kernel, size_t index, size_t *offset, size_t *size); /* of cuda.h */

Py_ssize_t read_integers(PyObject *sequence, uint64_t *out, Py_ssize_t most) {
    Py_ssize_t count = PySequence_Size(sequence);
    if (count > most) {
        PyErr_SetString(PyExc_OverflowError, "more than a native launch can hold");
        return -1;
    }
    for (Py_ssize_t i = 0; i < count; i++) {
        PyObject *item = PySequence_GetItem(sequence, i);
        if (item == NULL) return -1;
        out[i] = PyLong_AsUnsignedLongLongMask(item);
        Py_DECREF(item);
        if (PyErr_Occurred()) return -1;
    }
    return count;
}

int read_floats(PyObject *list, double *out, Py_ssize_t count) {
    if (!PyList_Check(list) || PyList_Size(list) != count) {
        PyErr_Format(PyExc_ValueError, "expected a list of %zd", count);
        return -1;
    }
    for (Py_ssize_t i = 0; i < count; i++) {
        PyObject *item = PyList_GetItem(list, i); /* NULL where the list has become shorter */
        if (item == NULL) return -1;
        Py_INCREF(item);
        out[i] = PyFloat_AsDouble(item);
        Py_DECREF(item);
        if (out[i] == -1.0 && PyErr_Occurred()) return -1;
    }
    return 0;
}

/* parameter_sizes(cuKernelGetParamInfo, kernel): the size in bytes of each of its parameters, the last of which is
   before the first index that is an invalid value. None where the driver says anything else, or of too many: Python
   asks again then, and finds out why. */
static PyObject *parameter_sizes(PyObject *unused, PyObject *args) {
    unsigned long long call, kernel;
    size_t offset, size[MOST_ASKED];
    Py_ssize_t count;
    int error = 0;
    PyObject *sizes;
    (void)unused;
    if (!PyArg_ParseTuple(args, "KK", &call, &kernel)) return NULL;
    Py_BEGIN_ALLOW_THREADS
    for (count = 0; count < MOST_ASKED; count++) {
        error = ((GetParameter)(uintptr_t)call)((void *)(uintptr_t)kernel, (size_t)count, &offset, &size[count]);
        if (error != 0) break;
    }
    Py_END_ALLOW_THREADS
    if (error != INVALID_VALUE) Py_RETURN_NONE;
    sizes = PyTuple_New(count);
    for (Py_ssize_t i = 0; sizes != NULL && i < count; i++) {
        PyObject *item = PyLong_FromSize_t(size[i]);
        if (item == NULL || PyTuple_SetItem(sizes, i, item) < 0) Py_CLEAR(sizes);
    }
    return sizes;
}

static PyMethodDef functions[] = {
    {"parameter_sizes", parameter_sizes, METH_VARARGS, "parameter_sizes(cuKernelGetParamInfo, kernel)"},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_native", NULL, -1, functions, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__native(void) {
    PyObject *self = PyModule_Create(&module);
    if (self == NULL) return NULL;
    if (PyModule_AddIntConstant(self, "INTERFACE", INTERFACE) < 0 || add_counter(self) < 0 || add_launch(self) < 0 ||
        add_pointers(self) < 0 || add_table(self) < 0 || add_program(self) < 0 || add_costs(self) < 0 ||
        add_effects(self) < 0 || add_trees(self) < 0) {
        Py_DECREF(self);
        return NULL;
    }
    return self;
}
