/* Cost programs: see runtime/program/costs.py, which checks them. What is wrong here all the same is a ValueError. */

#include "limits.h"
#include "native.h"
#include "rounding.h"
#include <math.h>

/* In the order of OPERATIONS in runtime/program/costs.py. */
enum { ADD, SUB, MUL, DIV, MAX, MIN, CEIL, FLOOR, SQRT, LOG, EXP, SELECT, CODES };
static const uint8_t arity[CODES] = {2, 2, 2, 2, 2, 2, 1, 1, 1, 1, 1, 4};
enum { OPERANDS = 4 };
static const double LARGEST_EXPONENT = 700.0;

/* Operations of one kind, next to each other. Writers order programs so that there are few runs: a switch for each
   operation is what takes long, where a processor cannot foresee it. */
typedef struct { uint32_t code, count; } Run;

typedef uint16_t Place;
_Static_assert(MAX_INPUTS + MAX_COST_NODES <= UINT16_MAX, "places of values take more than 16 bits");

typedef struct {
    PyObject_HEAD
    uint32_t inputs, constants, steps, runs, results;
    double *known; /* of inputs, constants, which stay, and steps: of the evaluation under way, with the GIL held */
    Run *run;
    Place *operand, *result; /* operands of all runs in a row */
} Costs;

static void costs_dealloc(PyObject *self) {
    Costs *costs = (Costs *)self;
    PyTypeObject *type = Py_TYPE(self);
    free(costs->known);
    free(costs->run);
    free(costs->operand);
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
        self->known[self->inputs + i] = PyFloat_AsDouble(PyList_GetItem(constants, i));
        if (PyErr_Occurred()) return -1;
    }
    for (uint32_t i = 0; i < self->steps; i++, known++) {
        uint8_t code = (uint8_t)codes[i];
        Run *last = self->runs == 0 ? NULL : &self->run[self->runs - 1];
        if (code >= CODES || at + arity[code] > there) {
            PyErr_Format(PyExc_ValueError, "its operations take more than the %zd operands that there are", there);
            return -1;
        }
        for (uint32_t j = 0; j < arity[code]; j++, at++) {
            long found = place(operands, at, known);
            if (found < 0) return -1;
            self->operand[at] = (Place)found;
        }
        if (last != NULL && last->code == code) last->count++;
        else self->run[self->runs++] = (Run){code, 1};
    }
    if (at != there) {
        PyErr_Format(PyExc_ValueError, "its operations take %zd operands, found %zd", at, there);
        return -1;
    }
    for (uint32_t i = 0; i < self->results; i++) {
        long found = place(results, i, known);
        if (found < 0) return -1;
        self->result[i] = (Place)found;
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
    self->known = calloc((size_t)self->inputs + self->constants + self->steps, sizeof(double));
    self->run = calloc((size_t)self->steps + 1, sizeof(Run));
    self->operand = calloc((size_t)self->steps * OPERANDS + 1, sizeof(Place));
    self->result = calloc((size_t)self->results + 1, sizeof(Place));
    if (self->known == NULL || self->run == NULL || self->operand == NULL || self->result == NULL) {
        Py_DECREF(self);
        return PyErr_NoMemory();
    }
    if (fill(self, constants, codes, operands, results) < 0) Py_CLEAR(self);
    return (PyObject *)self;
}

#define A known[x[0]]
#define B known[x[1]]
#define EACH(operands, result) \
    for (; next < end; x += (operands)) *next++ = (result); \
    return x

/* Compute the results of `run` from `next` on; the operands of the run after it. */
static const Place *compute(const Run *run, const Place *x, const double *known, double *next) {
    const double *end = next + run->count;
    switch (run->code) {
    case ADD: EACH(2, A + B);
    case SUB: EACH(2, A - B);
    case MUL: EACH(2, A * B);
    case DIV: EACH(2, B == 0 ? NAN : A / B);
    case MAX: EACH(2, A > B ? A : B);
    case MIN: EACH(2, A < B ? A : B);
    case CEIL: EACH(1, ceil(A) + 0.0); /* no negative zero, which Python has none of */
    case FLOOR: EACH(1, floor(A) + 0.0);
    case SQRT: EACH(1, A >= 0 ? sqrt(A) : NAN);
    case LOG: EACH(1, A > 0 && A < INFINITY ? log(A) : NAN);
    case EXP: EACH(1, A < LARGEST_EXPONENT ? exp(A) : NAN);
    default: EACH(4, A <= B ? known[x[2]] : known[x[3]]); /* SELECT */
    }
}

/* Compute the results for a number for each input; -1 with an exception set if there are not as many. */
static int results_for(Costs *self, PyObject *values, double *result) {
    double input[MAX_INPUTS], *next = self->known + self->inputs + self->constants;
    const Place *operand = self->operand;
    if (!PySequence_Check(values) || PySequence_Size(values) != (Py_ssize_t)self->inputs) {
        PyErr_SetString(PyExc_ValueError, "a cost program takes a value for each input");
        return -1;
    }
    for (uint32_t i = 0; i < self->inputs; i++) {
        PyObject *value = PySequence_GetItem(values, i);
        input[i] = value == NULL ? -1.0 : PyFloat_AsDouble(value);
        Py_XDECREF(value);
        if (input[i] == -1.0 && PyErr_Occurred()) return -1;
    }
    /* From here on nothing of Python runs, which might evaluate this again. */
    memcpy(self->known, input, self->inputs * sizeof *input);
    for (uint32_t i = 0; i < self->runs; next += self->run[i++].count)
        operand = compute(&self->run[i], operand, self->known, next);
    for (uint32_t i = 0; i < self->results; i++) {
        double value = self->known[self->result[i]];
        result[i] = isfinite(value) ? value : INFINITY;
    }
    return 0;
}

static PyObject *costs_evaluate(PyObject *object, PyObject *values) {
    Costs *self = (Costs *)object;
    double result[MAX_COST_RESULTS];
    PyObject *found;
    if (results_for(self, values, result) < 0) return NULL;
    found = PyList_New(self->results);
    for (uint32_t i = 0; found != NULL && i < self->results; i++) {
        PyObject *number = PyFloat_FromDouble(result[i]);
        if (number == NULL || PyList_SetItem(found, i, number) < 0) Py_CLEAR(found);
    }
    return found;
}

static PyObject *costs_least(PyObject *object, PyObject *args) {
    Costs *self = (Costs *)object;
    double result[MAX_COST_RESULTS];
    PyObject *values, *places;
    long least = -1;
    if (!PyArg_ParseTuple(args, "OO!", &values, &PyTuple_Type, &places) || results_for(self, values, result) < 0)
        return NULL;
    for (Py_ssize_t i = 0; i < PyTuple_Size(places); i++) {
        long place = PyLong_AsLong(PyTuple_GetItem(places, i));
        if (place < 0 || place >= (long)self->results) {
            if (!PyErr_Occurred()) PyErr_SetString(PyExc_ValueError, "there is no such result");
            return NULL;
        }
        if (least < 0 || result[place] < result[least]) least = place;
    }
    if (least < 0) PyErr_SetString(PyExc_ValueError, "the least of no results");
    return least < 0 ? NULL : PyLong_FromLong(least);
}

static PyMethodDef methods[] = {
    {"evaluate", costs_evaluate, METH_O, "evaluate(values): the results, infinite where they have no finite value"},
    {"least", costs_least, METH_VARARGS, "least(values, places): which of these results is the least, the first of equal ones"},
    {NULL, NULL, 0, NULL},
};
static PyType_Slot slots[] = {
    {Py_tp_new, (void *)costs_new},
    {Py_tp_dealloc, (void *)costs_dealloc},
    {Py_tp_methods, methods},
    {0, NULL},
};
static PyType_Spec spec = {"runtime.native._native.Costs", sizeof(Costs), 0, Py_TPFLAGS_DEFAULT, slots};

int add_costs(PyObject *module) {
    PyObject *type = PyType_FromSpec(&spec);
    return type == NULL ? -1 : PyModule_AddObject(module, "Costs", type);
}
