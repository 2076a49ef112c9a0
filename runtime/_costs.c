/* Cost programs: see runtime/costs.py, which checks them. What is wrong here all the same is a ValueError. */

#include "_limits.h"
#include "_native.h"
#include <math.h>

/* Each operation is rounded by itself, as Python's are. */
#if defined(__clang__)
#pragma STDC FP_CONTRACT OFF
#elif defined(__GNUC__)
#pragma GCC optimize("fp-contract=off")
#endif

/* In the order of OPERATIONS in runtime/costs.py. */
enum { ADD, SUB, MUL, DIV, MAX, MIN, CEIL, FLOOR, SQRT, LOG, EXP, SELECT, CODES };
static const uint8_t arity[CODES] = {2, 2, 2, 2, 2, 2, 1, 1, 1, 1, 1, 4};
enum { OPERANDS = 4 };
static const double LARGEST_EXPONENT = 700.0;

typedef struct { uint32_t code, x[OPERANDS]; } Step;

typedef struct {
    PyObject_HEAD
    uint32_t inputs, constants, steps, results;
    double *constant;
    Step *step;
    uint32_t *result;
} Costs;

static void costs_dealloc(PyObject *self) {
    Costs *costs = (Costs *)self;
    PyTypeObject *type = Py_TYPE(self);
    free(costs->constant);
    free(costs->step);
    free(costs->result);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(self);
    Py_DECREF(type);
}

/* Item `i` of a list: the place of a value that is one of `known`; -1 with an exception set. */
static long place(PyObject *list, Py_ssize_t i, uint32_t known) {
    PyObject *number = PyList_GetItem(list, i);
    long value = -1;
    if (number == NULL) return -1;
    if (PyLong_CheckExact(number)) value = PyLong_AsLong(number);
    if (value >= 0 && value < (long)known) return value;
    PyErr_Clear();
    PyErr_Format(PyExc_ValueError, "an operation or result is of %R, where there are %u values before it", number, known);
    return -1;
}

static int fill(Costs *self, PyObject *constants, const char *codes, PyObject *operands, PyObject *results) {
    uint32_t known = self->inputs + self->constants;
    Py_ssize_t at = 0, there = PyList_Size(operands);
    for (uint32_t i = 0; i < self->constants; i++) {
        self->constant[i] = PyFloat_AsDouble(PyList_GetItem(constants, i));
        if (PyErr_Occurred()) return -1;
    }
    for (uint32_t i = 0; i < self->steps; i++, known++) {
        Step *step = &self->step[i];
        step->code = (uint8_t)codes[i];
        if (step->code >= CODES || at + arity[step->code] > there) {
            PyErr_Format(PyExc_ValueError, "its operations take more than the %zd operands that there are", there);
            return -1;
        }
        for (uint32_t j = 0; j < arity[step->code]; j++) {
            long found = place(operands, at++, known);
            if (found < 0) return -1;
            step->x[j] = (uint32_t)found;
        }
    }
    if (at != there) {
        PyErr_Format(PyExc_ValueError, "its operations take %zd operands, found %zd", at, there);
        return -1;
    }
    for (uint32_t i = 0; i < self->results; i++) {
        long found = place(results, i, known);
        if (found < 0) return -1;
        self->result[i] = (uint32_t)found;
    }
    return 0;
}

/* Costs(inputs, constants, codes, operands, results) */
static PyObject *costs_new(PyTypeObject *type, PyObject *args, PyObject *keywords) {
    const char *codes;
    Py_ssize_t steps;
    unsigned inputs;
    PyObject *constants, *operands, *results;
    Costs *self;
    (void)keywords;
    if (!PyArg_ParseTuple(args, "IO!y#O!O!", &inputs, &PyList_Type, &constants, &codes, &steps, &PyList_Type, &operands,
                          &PyList_Type, &results))
        return NULL;
    if (inputs < 1 || inputs > MAX_INPUTS || PyList_Size(constants) + steps > MAX_COST_NODES ||
        PyList_Size(results) > MAX_COST_RESULTS) {
        PyErr_SetString(PyExc_ValueError, "the cost program is too large");
        return NULL;
    }
    self = (Costs *)((allocfunc)PyType_GetSlot(type, Py_tp_alloc))(type, 0);
    if (self == NULL) return NULL;
    self->inputs = inputs;
    self->constants = (uint32_t)PyList_Size(constants);
    self->steps = (uint32_t)steps;
    self->results = (uint32_t)PyList_Size(results);
    self->constant = calloc((size_t)self->constants + 1, sizeof(double));
    self->step = calloc((size_t)self->steps + 1, sizeof(Step));
    self->result = calloc((size_t)self->results + 1, sizeof(uint32_t));
    if (self->constant == NULL || self->step == NULL || self->result == NULL) {
        Py_DECREF(self);
        return PyErr_NoMemory();
    }
    if (fill(self, constants, codes, operands, results) < 0) Py_CLEAR(self);
    return (PyObject *)self;
}

static double computed(const Step *step, const double *known) {
    double a = known[step->x[0]], b = known[step->x[1]];
    switch (step->code) {
    case ADD: return a + b;
    case SUB: return a - b;
    case MUL: return a * b;
    case DIV: return b == 0 ? NAN : a / b;
    case MAX: return a > b ? a : b;
    case MIN: return a < b ? a : b;
    case CEIL: return ceil(a) + 0.0; /* no negative zero, which Python has none of */
    case FLOOR: return floor(a) + 0.0;
    case SQRT: return a >= 0 ? sqrt(a) : NAN;
    case LOG: return a > 0 && a < INFINITY ? log(a) : NAN;
    case EXP: return a < LARGEST_EXPONENT ? exp(a) : NAN;
    default: return a <= b ? known[step->x[2]] : known[step->x[3]]; /* SELECT */
    }
}

/* evaluate(values): a list of the results for a number for each input. */
static PyObject *costs_evaluate(PyObject *object, PyObject *values) {
    Costs *self = (Costs *)object;
    double *known, *next;
    PyObject *found = NULL;
    if (!PySequence_Check(values) || PySequence_Size(values) != (Py_ssize_t)self->inputs) {
        PyErr_SetString(PyExc_ValueError, "a cost program takes a value for each input");
        return NULL;
    }
    known = malloc(((size_t)self->inputs + self->constants + self->steps) * sizeof(double));
    if (known == NULL) return PyErr_NoMemory();
    for (uint32_t i = 0; i < self->inputs; i++) {
        PyObject *value = PySequence_GetItem(values, i);
        known[i] = value == NULL ? -1.0 : PyFloat_AsDouble(value);
        Py_XDECREF(value);
        if (known[i] == -1.0 && PyErr_Occurred()) goto done;
    }
    next = known + self->inputs;
    for (uint32_t i = 0; i < self->constants; i++) *next++ = self->constant[i];
    for (uint32_t i = 0; i < self->steps; i++) *next++ = computed(&self->step[i], known);
    found = PyList_New(self->results);
    for (uint32_t i = 0; found != NULL && i < self->results; i++) {
        double value = known[self->result[i]];
        PyObject *number = PyFloat_FromDouble(isfinite(value) ? value : INFINITY);
        if (number == NULL || PyList_SetItem(found, i, number) < 0) Py_CLEAR(found);
    }
done:
    free(known);
    return found;
}

static PyMethodDef methods[] = {
    {"evaluate", costs_evaluate, METH_O, "evaluate(values): the results, infinite where they have no finite value"},
    {NULL, NULL, 0, NULL},
};
static PyType_Slot slots[] = {
    {Py_tp_new, (void *)costs_new},
    {Py_tp_dealloc, (void *)costs_dealloc},
    {Py_tp_methods, methods},
    {0, NULL},
};
static PyType_Spec spec = {"runtime._native.Costs", sizeof(Costs), 0, Py_TPFLAGS_DEFAULT, slots};

int add_costs(PyObject *module) {
    PyObject *type = PyType_FromSpec(&spec);
    return type == NULL ? -1 : PyModule_AddObject(module, "Costs", type);
}
