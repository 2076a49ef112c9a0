/* Checks of addresses, read from Python once for each plan. */

#include "pointers.h"

static int read_pairs(PyObject *pairs, PointerChecks *out) {
    uint64_t places[2];
    for (uint32_t i = 0; i < out->pairs; i++) {
        PyObject *pair = PySequence_GetItem(pairs, i);
        Py_ssize_t found = pair == NULL ? -1 : read_integers(pair, places, 2);
        Py_XDECREF(pair);
        if (found != 2 || places[0] >= out->tensors || places[1] >= out->tensors) return 0;
        out->apart[i][0] = (uint8_t)places[0];
        out->apart[i][1] = (uint8_t)places[1];
    }
    return 1;
}

int read_checks(PyObject *object, PointerChecks *out) {
    PyObject *misaligned, *sizes, *apart;
    Py_ssize_t tensors, pairs;
    if (!PyTuple_Check(object) || PyTuple_Size(object) != 3) goto wrong;
    misaligned = PyTuple_GetItem(object, 0);
    sizes = PyTuple_GetItem(object, 1);
    apart = PyTuple_GetItem(object, 2);
    tensors = PySequence_Size(misaligned);
    pairs = PySequence_Size(apart);
    if (tensors < 0 || pairs < 0) return -1;
    if (tensors > MOST_TENSORS || pairs > MOST_APART) return 0;
    out->tensors = (uint32_t)tensors;
    out->pairs = (uint32_t)pairs;
    if (read_integers(misaligned, out->misaligned, MOST_TENSORS) != tensors ||
        read_integers(sizes, out->sizes, MOST_TENSORS) != tensors || !read_pairs(apart, out))
        goto wrong;
    return 1;
wrong:
    if (!PyErr_Occurred()) PyErr_SetString(PyExc_ValueError, "no checks of pointers");
    return -1;
}

/* pointers_fit(checks, pointers): as many pointers as the checks are of. */
static PyObject *fit(PyObject *unused, PyObject *args) {
    PyObject *object, *given;
    PointerChecks checks;
    uint64_t pointers[MOST_TENSORS];
    int read;
    (void)unused;
    if (!PyArg_ParseTuple(args, "OO", &object, &given)) return NULL;
    read = read_checks(object, &checks);
    if (read < 0) return NULL;
    if (read == 0 || read_integers(given, pointers, MOST_TENSORS) != checks.tensors) {
        if (!PyErr_Occurred()) PyErr_SetString(PyExc_ValueError, "a wrong number of pointers");
        return NULL;
    }
    return PyBool_FromLong(pointers_fit(&checks, pointers));
}

static PyMethodDef functions[] = {
    {"pointers_fit", fit, METH_VARARGS, "pointers_fit(checks, pointers)"},
    {NULL, NULL, 0, NULL},
};

int add_pointers(PyObject *module) { return PyModule_AddFunctions(module, functions); }
