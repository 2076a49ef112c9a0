/* The steady state of a call without Python: the plan for a shape is looked up by extents, strides and element types,
   its pointers are checked, and its kernels are launched.

   A cache of plans that Python keeps: what it does not have, or does not take, is left to `runtime.serve.gemm.calls`.
   What comes here was checked before, by Python or by program_read.c, which alone reads what an archive holds. */

#include "call_key.h"
#include "counter.h"
#include "launch.h"
#include "pointers.h"

typedef int (*GetCurrent)(void **context); /* of cuda.h */

enum { MOST_LAUNCHES = 4, MOST_ENTRIES = 4096, BUCKETS = 2 * MOST_ENTRIES, LAST_DEFAULT_STREAM = 2, OUT = 2 };

typedef struct Entry {
    uint64_t hash;
    struct Entry *next; /* while a table is cleared */
    uint32_t users; /* the table, and each call under way: whoever clears the table must not free it under those */
    uint32_t words, launches;
    int32_t device;
    Launch *launch[MOST_LAUNCHES];
    PointerChecks checks; /* of the tensors that are given and the output */
    uint64_t offsets[MOST_TENSORS]; /* bytes from where a tensor begins to what is launched on */
    PyObject *shape, *keywords; /* of `new_empty`, where the output is not given */
    Counter *counter; /* of calls launched */
    int64_t key[]; /* words */
} Entry;

typedef struct {
    PyObject_HEAD
    const ExchangeApi *api;
    PyObject *types, *new_empty;
    GetCurrent get_current; /* NULL: one device, any context will do */
    void *context;
    uint32_t count;
    Entry *entries[BUCKETS];
} Table;

/* Where the entry for `seen` is, or would be. */
static Entry **find(Table *self, const CallKey *seen) {
    uint64_t place = seen->hash % BUCKETS;
    for (;; place = (place + 1) % BUCKETS) {
        Entry *entry = self->entries[place];
        if (entry == NULL) return &self->entries[place];
        if (entry->hash == seen->hash && entry->words == seen->words &&
            memcmp(entry->key, seen->key, seen->words * sizeof *seen->key) == 0)
            return &self->entries[place];
    }
}

static void release(Entry *entry) {
    if (--entry->users > 0) return;
    for (uint32_t i = 0; i < entry->launches; i++) Py_DECREF(entry->launch[i]);
    Py_XDECREF(entry->shape);
    Py_XDECREF(entry->keywords);
    Py_DECREF(entry->counter);
    free(entry);
}

/* call(tag, stream, a, b, out, ...): the output, or of an operation its third tensor, if the launch is on its way, else
   None: then Python's path is to be taken, which finds out why. `stream` is None for the framework's current one, or an
   integer. */
static PyObject *table_call(PyObject *object, PyObject *const *args, Py_ssize_t count) {
    Table *self = (Table *)object;
    CallKey seen;
    Entry *entry;
    uint64_t pointers[MOST_TENSORS], stream;
    PyObject *out, *made = NULL;
    long long tag;
    if (count < 2 + OUT + 1) {
        PyErr_SetString(PyExc_TypeError, "call(tag, stream, a, b, out, ...)");
        return NULL;
    }
    tag = PyLong_AsLongLong(args[0]);
    if (tag == -1 && PyErr_Occurred()) return NULL;
    if (!read_call(self->api, self->types, tag, args + 2, count - 2, &seen)) Py_RETURN_NONE;
    entry = *find(self, &seen);
    if (entry == NULL) Py_RETURN_NONE;
    entry->users++; /* from here on Python may run, and change the table */
    if (args[1] == Py_None) {
        void *current = NULL;
        if (self->api->current_stream(DLPACK_CUDA, entry->device, &current) != 0) goto python;
        stream = (uint64_t)(uintptr_t)current;
    } else {
        if (!PyLong_CheckExact(args[1])) goto python;
        stream = PyLong_AsUnsignedLongLong(args[1]);
        if (PyErr_Occurred()) goto python;
    }
    if (self->get_current != NULL && stream <= LAST_DEFAULT_STREAM) {
        void *context = NULL;
        if (self->get_current(&context) != 0 || context != self->context) goto python;
    }
    for (uint32_t i = 0, j = 0; i < entry->checks.tensors; i++)
        if (i == OUT && entry->shape != NULL) pointers[i] = 0;
        else {
            uint64_t begin = address_of(&seen.tensor[j++]);
            if (begin == 0) goto python; /* no memory, whatever lies at an offset */
            pointers[i] = begin + entry->offsets[i];
        }
    out = args[2 + OUT];
    if (entry->shape != NULL) {
        DLTensor t;
        PyObject *given;
        if (args[1] != Py_None) goto python;
        given = PyTuple_Pack(2, args[2], entry->shape);
        if (given == NULL) goto error;
        made = PyObject_Call(self->new_empty, given, entry->keywords);
        Py_DECREF(given);
        if (made == NULL) goto error;
        if (self->api->view(made, &t) != 0) goto python;
        out = made;
        pointers[OUT] = address_of(&t);
    }
    if (!pointers_fit(&entry->checks, pointers)) goto python;
    for (uint32_t i = 0; i < entry->launches; i++)
        if (launch_or_fail(entry->launch[i], pointers, stream) < 0) goto error;
    entry->counter->count++;
    release(entry);
    if (made == NULL) Py_INCREF(out);
    return out;
python:
    PyErr_Clear();
    release(entry);
    Py_XDECREF(made);
    Py_RETURN_NONE;
error:
    release(entry);
    Py_XDECREF(made);
    return NULL;
}

static void clear(Table *self) {
    Entry *held = NULL;
    for (uint32_t i = 0; i < BUCKETS; i++)
        if (self->entries[i] != NULL) {
            self->entries[i]->next = held;
            held = self->entries[i];
            self->entries[i] = NULL;
        }
    self->count = 0;
    while (held != NULL) { /* to release one may run Python, which finds an empty table */
        Entry *next = held->next;
        release(held);
        held = next;
    }
}

/* put(tag, (a, b, out, ...), launches, checks, device, shape, keywords, counter, offsets=None): serve such calls from now
   on; False if they are not of a kind that this can. A full table begins anew. `out` and its shape: one of both. Each
   operand begins so many bytes behind its tensor as `offsets` say. */
static PyObject *table_put(PyObject *object, PyObject *args) {
    Table *self = (Table *)object;
    PyObject *tensors, *launches, *checks, *shape, *keywords, *counter, *offsets = Py_None;
    PyObject *given[MOST_TENSORS];
    long long tag;
    int device;
    CallKey seen;
    PointerChecks of_call;
    uint64_t begins[MOST_TENSORS] = {0};
    Entry *entry, *replaced, **place;
    int read;
    Py_ssize_t count, launched, operands;
    if (!PyArg_ParseTuple(args, "LO!O!OiOOO!|O", &tag, &PyTuple_Type, &tensors, &PyTuple_Type, &launches, &checks,
                          &device, &shape, &keywords, counter_type, &counter, &offsets))
        return NULL;
    count = PyTuple_Size(tensors);
    launched = PyTuple_Size(launches);
    if (count > MOST_TENSORS || launched == 0 || launched > MOST_LAUNCHES) Py_RETURN_FALSE;
    for (Py_ssize_t i = 0; i < count; i++) given[i] = PyTuple_GetItem(tensors, i);
    if (!read_call(self->api, self->types, tag, given, count, &seen)) Py_RETURN_FALSE;
    operands = seen.tensors + (shape != Py_None);
    for (Py_ssize_t i = 0; i < launched; i++) {
        PyObject *item = PyTuple_GetItem(launches, i);
        if (Py_TYPE(item) != launch_type || ((Launch *)item)->pointers != operands) Py_RETURN_FALSE;
    }
    read = read_checks(checks, &of_call);
    if (read < 0) return NULL;
    if (read == 0) Py_RETURN_FALSE;
    if (of_call.tensors != operands) {
        PyErr_SetString(PyExc_ValueError, "a wrong number of operands");
        return NULL;
    }
    if (offsets != Py_None && read_integers(offsets, begins, MOST_TENSORS) != operands) {
        if (!PyErr_Occurred()) PyErr_SetString(PyExc_ValueError, "a wrong number of offsets");
        return NULL;
    }
    if (self->count >= MOST_ENTRIES) clear(self);
    entry = calloc(1, sizeof *entry + seen.words * sizeof *seen.key);
    if (entry == NULL) return PyErr_NoMemory();
    memcpy(entry->offsets, begins, sizeof begins);
    entry->checks = of_call;
    entry->hash = seen.hash;
    entry->words = seen.words;
    memcpy(entry->key, seen.key, seen.words * sizeof *seen.key);
    entry->device = device;
    entry->launches = (uint32_t)launched;
    for (Py_ssize_t i = 0; i < launched; i++) {
        entry->launch[i] = (Launch *)PyTuple_GetItem(launches, i);
        Py_INCREF(entry->launch[i]);
    }
    if (shape != Py_None) {
        Py_INCREF(shape);
        Py_INCREF(keywords);
        entry->shape = shape;
        entry->keywords = keywords;
    }
    Py_INCREF(counter);
    entry->counter = (Counter *)counter;
    entry->users = 1;
    place = find(self, &seen);
    replaced = *place;
    *place = entry; /* before the other is released, which may run Python and so a call of this shape */
    if (replaced != NULL) release(replaced);
    else self->count++;
    Py_RETURN_TRUE;
}

static PyObject *table_count(PyObject *object, PyObject *unused) {
    (void)unused;
    return PyLong_FromUnsignedLong(((Table *)object)->count);
}

static PyObject *table_clear(PyObject *object, PyObject *unused) {
    (void)unused;
    clear((Table *)object);
    Py_RETURN_NONE;
}

/* Table(capsule, types, new_empty, cuCtxGetCurrent or 0, context): for objects of exactly these types, whose exchange
   API the capsule has. ValueError: it is of another version than this knows. */
static PyObject *table_new(PyTypeObject *type, PyObject *args, PyObject *keywords) {
    PyObject *capsule, *types, *new_empty;
    unsigned long long get_current, context;
    const ExchangeApi *api;
    Table *self;
    (void)keywords;
    if (!PyArg_ParseTuple(args, "OO!OKK", &capsule, &PyTuple_Type, &types, &new_empty, &get_current, &context))
        return NULL;
    api = PyCapsule_GetPointer(capsule, "dlpack_exchange_api");
    if (api == NULL) return NULL;
    if (api->version.major != DLPACK_MAJOR || api->view == NULL || api->current_stream == NULL) {
        PyErr_SetString(PyExc_ValueError, "another version of DLPack's exchange API");
        return NULL;
    }
    self = (Table *)((allocfunc)PyType_GetSlot(type, Py_tp_alloc))(type, 0);
    if (self == NULL) return NULL;
    Py_INCREF(types);
    Py_INCREF(new_empty);
    self->api = api;
    self->types = types;
    self->new_empty = new_empty;
    self->get_current = (GetCurrent)(uintptr_t)get_current;
    self->context = (void *)(uintptr_t)context;
    return (PyObject *)self;
}

static void table_dealloc(PyObject *object) {
    PyTypeObject *type = Py_TYPE(object);
    Table *self = (Table *)object;
    clear(self);
    Py_XDECREF(self->types);
    Py_XDECREF(self->new_empty);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(object);
    Py_DECREF(type);
}

static PyMethodDef table_methods[] = {
    {"call", (PyCFunction)(void (*)(void))table_call, METH_FASTCALL, "call(tag, stream, a, b, out, ...)"},
    {"put", table_put, METH_VARARGS, "put(tag, tensors, launches, checks, device, shape, keywords, counter, offsets)"},
    {"count", table_count, METH_NOARGS, "count()"},
    {"clear", table_clear, METH_NOARGS, "clear()"},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot table_slots[] = {
    {Py_tp_new, table_new},
    {Py_tp_dealloc, table_dealloc},
    {Py_tp_methods, table_methods},
    {0, NULL},
};

static PyType_Spec table_spec = {"runtime.native._native.Table", sizeof(Table), 0, Py_TPFLAGS_DEFAULT, table_slots};

int add_table(PyObject *module) {
    PyObject *type = PyType_FromSpec(&table_spec);
    return type == NULL ? -1 : PyModule_AddObject(module, "Table", type);
}
