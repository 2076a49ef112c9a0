/* Log ratios that are known at some places and guessed between them, and times that their sums set right: see
   aot/tune/calibrate.py. */

#include "native.h"
#include "rounding.h"

#include <math.h>

enum { MOST_KNOWN = 1 << 20, MOST_EFFECTS = 16 };

/* Known at `x`, ascending; `scale` has one over the hyperbolic sine of how far apart two of them are, in reaches. */
typedef struct {
    PyObject_HEAD
    Py_ssize_t known;
    double reach, *x, *value, *scale;
} Effect;

static void effect_dealloc(PyObject *self) {
    PyTypeObject *type = Py_TYPE(self);
    free(((Effect *)self)->x);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(self);
    Py_DECREF(type);
}

/* Effect(xs, values, reach) */
static PyObject *effect_new(PyTypeObject *type, PyObject *args, PyObject *keywords) {
    PyObject *xs, *values;
    double reach;
    Effect *self;
    (void)keywords;
    if (!PyArg_ParseTuple(args, "O!Od", &PyList_Type, &xs, &values, &reach)) return NULL;
    Py_ssize_t known = PyList_Size(xs);
    if (known < 1 || known > MOST_KNOWN || !(reach > 0)) {
        PyErr_SetString(PyExc_ValueError, "an effect is known at 1 to 2^20 places, and reaches somewhere");
        return NULL;
    }
    self = (Effect *)((allocfunc)PyType_GetSlot(type, Py_tp_alloc))(type, 0);
    if (self == NULL) return NULL;
    self->known = known;
    self->reach = reach;
    self->x = malloc(3 * (size_t)known * sizeof *self->x);
    if (self->x == NULL) {
        Py_DECREF(self);
        return PyErr_NoMemory();
    }
    self->value = self->x + known;
    self->scale = self->value + known;
    if (read_floats(xs, self->x, known) < 0 || read_floats(values, self->value, known) < 0) {
        Py_DECREF(self);
        return NULL;
    }
    for (Py_ssize_t i = 0; i + 1 < known; i++)
        self->scale[i] = 1 / sinh((self->x[i + 1] - self->x[i]) / reach);
    return (PyObject *)self;
}

static double at(const Effect *self, double x) {
    Py_ssize_t after = 0, end = self->known;
    while (after < end) {
        Py_ssize_t middle = after + (end - after) / 2;
        if (self->x[middle] < x) after = middle + 1;
        else end = middle;
    }
    if (after == self->known) return self->value[after - 1] * exp(-(x - self->x[after - 1]) / self->reach);
    if (after == 0 || self->x[after] == x) return self->value[after] * exp(-(self->x[after] - x) / self->reach);
    double a = self->x[after - 1], b = self->x[after], scale = self->scale[after - 1];
    double left = self->value[after - 1], right = self->value[after];
    if (isinf(self->reach)) return left + (right - left) * (x - a) / (b - a);
    return (left * sinh((b - x) / self->reach) + right * sinh((x - a) / self->reach)) * scale;
}

/* times(self, others, estimates, xs): each estimate times e to the sum of effects at its x, in order. */
static PyObject *effect_times(PyObject *object, PyObject *args) {
    PyObject *others, *estimates, *xs, *found;
    const Effect *effects[MOST_EFFECTS] = {(const Effect *)object};
    if (!PyArg_ParseTuple(args, "O!O!O!", &PyTuple_Type, &others, &PyList_Type, &estimates, &PyList_Type, &xs)) return NULL;
    Py_ssize_t more = PyTuple_Size(others), count = PyList_Size(xs);
    int fits = more < MOST_EFFECTS && PyList_Size(estimates) == count;
    for (Py_ssize_t i = 0; fits && i < more; i++) {
        PyObject *other = PyTuple_GetItem(others, i);
        fits = Py_TYPE(other) == Py_TYPE(object);
        effects[i + 1] = (const Effect *)other;
    }
    if (!fits) {
        PyErr_SetString(PyExc_ValueError, "times takes few effects, and an estimate for each place");
        return NULL;
    }
    double *given = malloc((2 * (size_t)count + 1) * sizeof *given);
    if (given == NULL) return PyErr_NoMemory();
    found = read_floats(estimates, given, count) < 0 || read_floats(xs, given + count, count) < 0 ? NULL : PyList_New(count);
    for (Py_ssize_t i = 0; found != NULL && i < count; i++) {
        double sum = 0.0;
        for (Py_ssize_t j = 0; j <= more; j++) sum += at(effects[j], given[count + i]);
        PyObject *us = PyFloat_FromDouble(given[i] * exp(sum));
        if (us == NULL || PyList_SetItem(found, i, us) < 0) Py_CLEAR(found);
    }
    free(given);
    return found;
}

static PyMethodDef methods[] = {
    {"times", effect_times, METH_VARARGS, "times(others, estimates, xs): estimates times e to the sum of effects at xs"},
    {NULL, NULL, 0, NULL},
};
static PyType_Slot slots[] = {
    {Py_tp_new, (void *)effect_new},
    {Py_tp_dealloc, (void *)effect_dealloc},
    {Py_tp_methods, methods},
    {0, NULL},
};
static PyType_Spec spec = {"runtime.native._native.Effect", sizeof(Effect), 0, Py_TPFLAGS_DEFAULT, slots};

int add_effects(PyObject *module) {
    PyObject *type = PyType_FromSpec(&spec);
    return type == NULL ? -1 : PyModule_AddObject(module, "Effect", type);
}
