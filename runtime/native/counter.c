/* A count that calls raise without Python. */

#include "counter.h"

PyTypeObject *counter_type;

static PyObject *counter_add(PyObject *object, PyObject *unused) {
    (void)unused;
    ((Counter *)object)->count++;
    Py_RETURN_NONE;
}

static PyObject *counter_read(PyObject *object, PyObject *unused) {
    (void)unused;
    return PyLong_FromUnsignedLongLong(((Counter *)object)->count);
}

static PyMethodDef counter_methods[] = {
    {"add", counter_add, METH_NOARGS, "add()"},
    {"read", counter_read, METH_NOARGS, "read()"},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot counter_slots[] = {{Py_tp_methods, counter_methods}, {0, NULL}};

static PyType_Spec counter_spec = {"runtime.native._native.Counter", sizeof(Counter), 0, Py_TPFLAGS_DEFAULT, counter_slots};

int add_counter(PyObject *module) {
    counter_type = (PyTypeObject *)PyType_FromSpec(&counter_spec);
    if (counter_type == NULL) return -1;
    Py_INCREF(counter_type); /* the global's own */
    return PyModule_AddObject(module, "Counter", (PyObject *)counter_type);
}
