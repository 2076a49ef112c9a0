/* libFuzzer on the native readers of launch programs and cost programs, in an embedded Python.

   Bytes become a call of Program.read or Costs: each begins an object (`Tag`), so that any bytes are some arguments and
   a mutation is mostly one object changed. What was read is evaluated with what bytes are left. tests/fuzz/native.py
   builds this with sanitizers, writes seeds, and says how to run it. Aborted on: an exception where none is promised. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "words.h" /* WORDS, which tests/fuzz/native.py writes */

PyMODINIT_FUNC PyInit__native(void);

enum { MOST_DEPTH = 12, WORD_COUNT = sizeof WORDS / sizeof *WORDS };

/* The first byte of an object. Below INTEGERS it is that integer; tests/fuzz/native.py writes the same. */
enum Tag {
    INTEGERS = 0x80,
    WORD = 0x80, /* and a number of a word */
    LISTS = 0xC0, /* and how many items */
    LONG_LIST = 0xE0,
    INTEGER_16,
    INTEGER_32,
    INTEGER_64,
    NONE,
    TRUE,
    FLOAT,
    HUGE_INTEGER,
    NEGATIVE,
    EMPTY_OBJECT,
    LAUNCH,
    PARAMETER,
    EMPTY_WORD,
    WORD_WITH_NUL,
    BYTES,
};

static const char *const LAUNCH_FIELDS[] = {"kernel", "grid", "block", "shared_bytes", "attributes", "parameters"};
static const char *const PARAMETER_FIELDS[] = {"size", "words", "slots"};
static PyObject *program_type, *costs_type, *words[WORD_COUNT];

typedef struct {
    const uint8_t *at, *end;
} Input;

static uint64_t take(Input *in, size_t bytes) {
    uint64_t value = 0;
    size_t left = (size_t)(in->end - in->at);
    if (bytes > left) bytes = left;
    memcpy(&value, in->at, bytes);
    in->at += bytes;
    return value;
}

static PyObject *object(Input *in, int depth);

static PyObject *list_of(Input *in, size_t count, int depth) {
    PyObject *list = PyList_New(0);
    for (size_t i = 0; i < count && in->at < in->end; i++) {
        PyObject *item = object(in, depth + 1);
        PyList_Append(list, item);
        Py_DECREF(item);
    }
    return list;
}

static PyObject *fields_of(Input *in, const char *const *names, size_t count, int depth) {
    PyObject *found = PyDict_New();
    for (size_t i = 0; i < count; i++) {
        PyObject *item = object(in, depth + 1);
        PyDict_SetItemString(found, names[i], item);
        Py_DECREF(item);
    }
    return found;
}

static PyObject *object(Input *in, int depth) {
    uint8_t tag = (uint8_t)take(in, 1);
    double real;
    uint64_t bits;
    if (tag < INTEGERS) return PyLong_FromLong(tag);
    if (depth > MOST_DEPTH) return PyList_New(0);
    if (tag < LISTS) {
        PyObject *word = words[(tag - WORD) % WORD_COUNT];
        Py_INCREF(word);
        return word;
    }
    if (tag < LONG_LIST) return list_of(in, tag - LISTS, depth);
    switch (tag) {
    case LONG_LIST: return list_of(in, (size_t)take(in, 2), depth);
    case INTEGER_16: return PyLong_FromUnsignedLongLong(take(in, 2));
    case INTEGER_32: return PyLong_FromUnsignedLongLong(take(in, 4));
    case INTEGER_64: return PyLong_FromUnsignedLongLong(take(in, 8));
    case NONE: Py_RETURN_NONE;
    case TRUE: Py_RETURN_TRUE;
    case FLOAT:
        bits = take(in, 8);
        memcpy(&real, &bits, 8);
        return PyFloat_FromDouble(real);
    case HUGE_INTEGER: return PyLong_FromString("1234567890123456789012345678901234567890", NULL, 10);
    case NEGATIVE: return PyLong_FromLongLong(-(long long)(take(in, 8) & INT64_MAX));
    case EMPTY_OBJECT: return PyDict_New();
    case LAUNCH: return fields_of(in, LAUNCH_FIELDS, 6, depth);
    case PARAMETER: return fields_of(in, PARAMETER_FIELDS, 3, depth);
    case EMPTY_WORD: return PyUnicode_FromString("");
    case WORD_WITH_NUL: return PyUnicode_FromStringAndSize("add\0", 4);
    case BYTES: {
        size_t count = (size_t)take(in, 2), left = (size_t)(in->end - in->at);
        if (count > left) count = left;
        in->at += count;
        return PyBytes_FromStringAndSize((const char *)in->at - count, (Py_ssize_t)count);
    }
    default: Py_RETURN_FALSE;
    }
}

/* Give up a result, which may be NULL only with an exception, and that one of `allowed`. */
static void done(PyObject *result, PyObject *allowed) {
    if (result == NULL && (allowed == NULL || !PyErr_ExceptionMatches(allowed))) {
        PyErr_Print();
        abort();
    }
    PyErr_Clear();
    Py_XDECREF(result);
}

static PyObject *inputs_of(Input *in, Py_ssize_t count) {
    PyObject *inputs = PyTuple_New(count);
    for (Py_ssize_t i = 0; i < count; i++) PyTuple_SetItem(inputs, i, object(in, MOST_DEPTH));
    return inputs;
}

static void read_program(Input *in) {
    unsigned long long pointers = take(in, 1), kernels = take(in, 1);
    PyObject *widths = object(in, 0), *nodes = object(in, 0), *launches = object(in, 0);
    PyObject *program = PyObject_CallMethod(program_type, "read", "OOOKK", widths, nodes, launches, pointers, kernels);
    if (program == NULL) done(program, NULL);
    if (program != Py_None) {
        for (int i = 0; i < 2; i++) {
            PyObject *inputs = inputs_of(in, PyList_Size(widths));
            done(PyObject_CallMethod(program, "evaluate", "(O)", inputs), NULL);
            Py_DECREF(inputs);
        }
        done(PyObject_CallMethod(program, "shapes", NULL), NULL);
        done(PyObject_CallMethod(program, "steps", NULL), NULL);
    }
    Py_DECREF(program);
    Py_DECREF(widths);
    Py_DECREF(nodes);
    Py_DECREF(launches);
}

static void read_costs(Input *in) {
    PyObject *arguments[5], *of_values = PyTuple_Pack(2, PyExc_ValueError, PyExc_TypeError), *costs;
    PyObject *allowed = PyTuple_Pack(3, of_values, PyExc_OverflowError, PyExc_SystemError);
    for (int i = 0; i < 5; i++) arguments[i] = object(in, 0);
    costs = PyObject_CallFunction(costs_type, "OOOOO", arguments[0], arguments[1], arguments[2], arguments[3], arguments[4]);
    if (costs != NULL) {
        PyObject *inputs = inputs_of(in, (Py_ssize_t)PyLong_AsLong(arguments[0]));
        PyObject *places = PyList_AsTuple(arguments[4]);
        PyErr_Clear();
        done(PyObject_CallMethod(costs, "evaluate", "(O)", inputs), allowed);
        if (places != NULL) done(PyObject_CallMethod(costs, "least", "OO", inputs, places), allowed);
        PyErr_Clear();
        Py_XDECREF(places);
        Py_DECREF(inputs);
    }
    done(costs, allowed);
    for (int i = 0; i < 5; i++) Py_DECREF(arguments[i]);
    Py_DECREF(allowed);
    Py_DECREF(of_values);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    Input in = {data, data + size};
    if (size == 0) return 0;
    if (take(&in, 1) % 4 != 0) read_program(&in);
    else read_costs(&in);
    return 0;
}

int LLVMFuzzerInitialize(int *count, char ***arguments) {
    PyPreConfig before;
    PyConfig config;
    PyObject *module;
    (void)count;
    (void)arguments;
    PyPreConfig_InitIsolatedConfig(&before);
    before.allocator = PYMEM_ALLOCATOR_MALLOC; /* so that sanitizers see objects too */
    Py_PreInitialize(&before);
    PyImport_AppendInittab("_native", PyInit__native);
    PyConfig_InitIsolatedConfig(&config);
    config.install_signal_handlers = 0;
    config.site_import = 0;
    if (PyStatus_Exception(Py_InitializeFromConfig(&config))) abort();
    module = PyImport_ImportModule("_native");
    if (module == NULL) abort();
    program_type = PyObject_GetAttrString(module, "Program");
    costs_type = PyObject_GetAttrString(module, "Costs");
    for (int i = 0; i < WORD_COUNT; i++) words[i] = PyUnicode_FromString(WORDS[i]);
    return 0;
}
