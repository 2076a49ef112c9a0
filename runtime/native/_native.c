/* The steady state of a launch without Python: read tensors, look the shape up, patch pointers, cuLaunchKernelEx.

   Optional: where this was not built, `runtime.serve.library` and `runtime.device.driver` do the same in Python. What comes here was
   checked before, by Python or by _program_read.c, which alone reads what an archive holds. Built against Python's stable
   ABI, and against neither torch nor CUDA: tensors are read through the exchange API of DLPack 1.3 that their type
   offers (__dlpack_c_exchange_api__), and the driver's functions come as addresses. */

#include "native.h"

enum { INTERFACE = 6 }; /* that of runtime/native/__init__.py */

/* --- ABI of others: dlpack.h 1.3, cuda.h --- */

typedef struct {
    void *data;
    struct { int32_t type, id; } device;
    int32_t ndim;
    struct { uint8_t code, bits; uint16_t lanes; } dtype;
    int64_t *shape, *strides;
    uint64_t byte_offset;
} DLTensor;

typedef struct {
    struct { uint32_t major, minor; } version;
    void *previous;
    void *allocate, *from_object, *to_object;
    int (*view)(void *object, DLTensor *out);
    int (*current_stream)(int32_t device_type, int32_t device, void **stream);
} ExchangeApi;

enum { DLPACK_MAJOR = 1, DLPACK_CUDA = 2 };

typedef struct {
    uint32_t grid[3], block[3], shared_bytes;
    void *stream;
    const void *attributes;
    uint32_t count;
} Config; /* CUlaunchConfig */

enum { ATTRIBUTE_BYTES = 72, ATTRIBUTE_WORDS = 16 }; /* CUlaunchAttribute: an id, a pad, 64 bytes of value */

typedef int (*LaunchKernel)(const Config *, void *function, void **parameters, void **extra);
typedef int (*GetCurrent)(void **context);
typedef int (*GetParameter)(void *kernel, size_t index, size_t *offset, size_t *size);

enum { INVALID_VALUE = 1 }; /* of CUresult */

/* --- one prepared launch --- */

enum { MOST_TENSORS = 12 };
enum { MOST_BYTES = 4096, MOST_PARAMETERS = 32, MOST_ATTRIBUTES = 4, ALIGNMENT = 64 };

typedef struct { uint32_t offset, pointer; uint64_t addend, mask; } Slot;

typedef struct {
    PyObject_VAR_HEAD
    PyObject *failed; /* called with this, its grid, block and shared bytes, the pointers, the stream and the CUresult */
    PyObject *weakrefs; /* who would unload the kernel sees by one whether a call still holds this */
    LaunchKernel call;
    void *function;
    Config config;
    uint32_t attributes[MOST_ATTRIBUTES][ATTRIBUTE_BYTES / 4];
    uint32_t size, parameters, slots, pointers;
    Slot *slot; /* these and what is below are in `rest` */
    uint32_t *offset; /* of each parameter */
    unsigned char *template; /* size */
    uint64_t rest[];
} Launch;

static PyTypeObject *launch_type;

/* The driver reads parameters during the call only, so they are on the stack: any number of threads may be here. */
static int launch(const Launch *self, const uint64_t *pointers, uint64_t stream) {
    unsigned char storage[MOST_BYTES + ALIGNMENT];
    unsigned char *buffer = storage + (-(uintptr_t)storage & (ALIGNMENT - 1));
    void *parameters[MOST_PARAMETERS];
    Config config = self->config;
    int result;
    memcpy(buffer, self->template, self->size);
    for (uint32_t i = 0; i < self->slots; i++) {
        const Slot *slot = &self->slot[i];
        uint64_t word = (pointers[slot->pointer] + slot->addend) & slot->mask;
        memcpy(buffer + slot->offset, &word, sizeof word);
    }
    for (uint32_t i = 0; i < self->parameters; i++) parameters[i] = buffer + self->offset[i];
    config.stream = (void *)(uintptr_t)stream;
    config.attributes = self->attributes;
    Py_BEGIN_ALLOW_THREADS
    result = self->call(&config, self->function, parameters, NULL);
    Py_END_ALLOW_THREADS
    return result;
}

/* 0, or -1 with an exception set: what `failed` raised, if it did. */
static int launch_or_fail(Launch *self, const uint64_t *pointers, uint64_t stream) {
    int error = launch(self, pointers, stream);
    const uint32_t *grid = self->config.grid, *block = self->config.block;
    PyObject *given, *answer;
    if (error == 0) return 0;
    given = PyTuple_New(self->pointers);
    if (given == NULL) return -1;
    for (uint32_t i = 0; i < self->pointers; i++) {
        PyObject *pointer = PyLong_FromUnsignedLongLong(pointers[i]);
        if (pointer == NULL || PyTuple_SetItem(given, i, pointer) < 0) {
            Py_DECREF(given);
            return -1;
        }
    }
    answer = PyObject_CallFunction(self->failed, "O((III)(III)I)OKi", self, grid[0], grid[1], grid[2], block[0],
                                   block[1], block[2], self->config.shared_bytes, given, (unsigned long long)stream,
                                   error);
    Py_DECREF(given);
    if (answer == NULL) return -1;
    Py_DECREF(answer);
    return 0;
}

/* A sequence of integers as they are read by `read`; -1 with an exception set if there are more than `most`. */
static Py_ssize_t integers(PyObject *sequence, uint64_t *out, Py_ssize_t most) {
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

/* A launch with room for so many slots, parameters and bytes of these, or NULL with an exception set. */
static Launch *launch_alloc(PyTypeObject *type, Py_ssize_t slots, Py_ssize_t parameters, Py_ssize_t size) {
    Py_ssize_t rest = slots * (Py_ssize_t)sizeof(Slot) + parameters * (Py_ssize_t)sizeof(uint32_t) + size;
    Launch *self = (Launch *)((allocfunc)PyType_GetSlot(type, Py_tp_alloc))(type, rest);
    if (self == NULL) return NULL;
    self->slots = (uint32_t)slots;
    self->parameters = (uint32_t)parameters;
    self->size = (uint32_t)size;
    self->slot = (Slot *)self->rest;
    self->offset = (uint32_t *)(self->slot + slots);
    self->template = (unsigned char *)(self->offset + parameters);
    return self;
}

/* Launch(cuLaunchKernelEx, function, (grid, block and shared bytes), ((attribute, words...), ...), parameters, offsets,
          ((offset, pointer, addend, mask), ...), number of pointers, failed)
   OverflowError: it is larger than this can hold. */
static PyObject *launch_new(PyTypeObject *type, PyObject *args, PyObject *keywords) {
    unsigned long long call, function;
    PyObject *shape, *attributes, *offsets, *slots, *failed;
    const char *parameters;
    Py_ssize_t size, count, slots_given, parameters_given;
    unsigned int pointers;
    uint64_t words[ATTRIBUTE_WORDS + 1], found[MOST_PARAMETERS];
    Launch *self;
    (void)keywords;
    if (!PyArg_ParseTuple(args, "KKOOy#OOIO", &call, &function, &shape, &attributes, &parameters, &size, &offsets,
                          &slots, &pointers, &failed))
        return NULL;
    slots_given = PySequence_Size(slots);
    parameters_given = integers(offsets, found, MOST_PARAMETERS);
    if (slots_given < 0 || parameters_given < 0) return NULL;
    if (size > MOST_BYTES || pointers > MOST_TENSORS) {
        PyErr_SetString(PyExc_OverflowError, "more than a native launch can hold");
        return NULL;
    }
    self = launch_alloc(type, slots_given, parameters_given, size);
    if (self == NULL) return NULL;
    Py_INCREF(failed);
    self->failed = failed;
    self->call = (LaunchKernel)(uintptr_t)call;
    self->function = (void *)(uintptr_t)function;
    self->pointers = pointers;
    memcpy(self->template, parameters, (size_t)size);
    if (integers(shape, words, 7) != 7) goto wrong;
    for (int i = 0; i < 3; i++) {
        self->config.grid[i] = (uint32_t)words[i];
        self->config.block[i] = (uint32_t)words[i + 3];
    }
    self->config.shared_bytes = (uint32_t)words[6];
    count = PySequence_Size(attributes);
    if (count < 0 || count > MOST_ATTRIBUTES) goto wrong;
    self->config.count = (uint32_t)count;
    for (Py_ssize_t i = 0; i < count; i++) {
        PyObject *item = PySequence_GetItem(attributes, i);
        Py_ssize_t found = item == NULL ? -1 : integers(item, words, ATTRIBUTE_WORDS + 1);
        Py_XDECREF(item);
        if (found < 1) goto wrong;
        self->attributes[i][0] = (uint32_t)words[0];
        for (Py_ssize_t j = 1; j < found; j++) self->attributes[i][j + 1] = (uint32_t)words[j];
    }
    for (Py_ssize_t i = 0; i < parameters_given; i++) {
        if (found[i] > (uint64_t)size) goto wrong;
        self->offset[i] = (uint32_t)found[i];
    }
    for (Py_ssize_t i = 0; i < slots_given; i++) {
        PyObject *item = PySequence_GetItem(slots, i);
        count = item == NULL ? -1 : integers(item, words, 4);
        Py_XDECREF(item);
        if (count != 4 || size < 8 || words[0] > (uint64_t)size - 8 || words[1] >= pointers) goto wrong;
        self->slot[i] = (Slot){(uint32_t)words[0], (uint32_t)words[1], words[2], words[3]};
    }
    return (PyObject *)self;
wrong:
    if (!PyErr_Occurred()) PyErr_SetString(PyExc_OverflowError, "more than a native launch can hold");
    Py_DECREF(self);
    return NULL;
}

static void launch_dealloc(PyObject *object) {
    PyTypeObject *type = Py_TYPE(object);
    if (((Launch *)object)->weakrefs != NULL) PyObject_ClearWeakRefs(object);
    Py_XDECREF(((Launch *)object)->failed);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(object);
    Py_DECREF(type);
}

/* launch(pointers, stream): as many pointers as there are. */
static PyObject *launch_run(PyObject *object, PyObject *const *args, Py_ssize_t count) {
    Launch *self = (Launch *)object;
    uint64_t pointers[MOST_TENSORS], stream;
    if (count != 2) {
        PyErr_SetString(PyExc_TypeError, "launch(pointers, stream)");
        return NULL;
    }
    if (integers(args[0], pointers, MOST_TENSORS) != self->pointers) {
        if (!PyErr_Occurred()) PyErr_SetString(PyExc_ValueError, "a wrong number of pointers");
        return NULL;
    }
    stream = PyLong_AsUnsignedLongLong(args[1]);
    if (PyErr_Occurred() || launch_or_fail(self, pointers, stream) < 0) return NULL;
    Py_RETURN_NONE;
}

/* again(grid, parameters): this with another grid and other bytes of parameters, of which there are as many. */
static PyObject *launch_again(PyObject *object, PyObject *args) {
    const Launch *self = (Launch *)object;
    unsigned int grid[3];
    const char *parameters;
    Py_ssize_t size;
    Launch *other;
    if (!PyArg_ParseTuple(args, "(III)y#", &grid[0], &grid[1], &grid[2], &parameters, &size)) return NULL;
    if (size != (Py_ssize_t)self->size) {
        PyErr_SetString(PyExc_ValueError, "a wrong number of bytes of parameters");
        return NULL;
    }
    other = launch_alloc(Py_TYPE(object), self->slots, self->parameters, size);
    if (other == NULL) return NULL;
    Py_INCREF(self->failed);
    other->failed = self->failed;
    other->call = self->call;
    other->function = self->function;
    other->config = self->config;
    for (int i = 0; i < 3; i++) other->config.grid[i] = grid[i];
    memcpy(other->attributes, self->attributes, sizeof self->attributes);
    other->pointers = self->pointers;
    memcpy(other->slot, self->slot, self->slots * sizeof *self->slot);
    memcpy(other->offset, self->offset, self->parameters * sizeof *self->offset);
    memcpy(other->template, parameters, (size_t)size);
    return (PyObject *)other;
}

static PyMethodDef launch_methods[] = {
    {"again", launch_again, METH_VARARGS, "again(grid, parameters)"},
    {"launch", (PyCFunction)(void (*)(void))launch_run, METH_FASTCALL, "launch(pointers, stream)"},
    {NULL, NULL, 0, NULL},
};

static PyMemberDef launch_members[] = {
    {"__weaklistoffset__", T_PYSSIZET, offsetof(Launch, weakrefs), READONLY, NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyType_Slot launch_slots[] = {
    {Py_tp_new, launch_new},
    {Py_tp_dealloc, launch_dealloc},
    {Py_tp_methods, launch_methods},
    {Py_tp_members, launch_members},
    {0, NULL},
};

static PyType_Spec launch_spec = {"runtime.native._native.Launch", offsetof(Launch, rest), 1, Py_TPFLAGS_DEFAULT, launch_slots};

/* --- how often --- */

typedef struct {
    PyObject_HEAD
    uint64_t count; /* changed with the GIL held, so exact */
} Counter;

static PyTypeObject *counter_type;

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

/* --- the table of shapes --- */

enum { MOST_DIMS = 5, WORDS_OF_TENSOR = 3 + 2 * MOST_DIMS, MOST_WORDS = 1 + MOST_TENSORS * WORDS_OF_TENSOR };
enum { MOST_LAUNCHES = 4, MOST_ENTRIES = 4096, BUCKETS = 2 * MOST_ENTRIES, LAST_DEFAULT_STREAM = 2, OUT = 2 };

typedef struct Entry {
    uint64_t hash;
    struct Entry *next; /* while a table is cleared */
    uint32_t users; /* the table, and each call under way: whoever clears the table must not free it under those */
    uint32_t words, tensors, launches;
    int32_t device;
    Launch *launch[MOST_LAUNCHES];
    uint64_t misaligned[MOST_TENSORS], bytes[MOST_TENSORS];
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

static PyTypeObject *table_type;

typedef struct {
    DLTensor tensor[MOST_TENSORS]; /* those that are given, in order */
    uint32_t tensors, words;
    uint64_t hash;
    int64_t key[MOST_WORDS];
} Seen;

static int is_tensor(const Table *self, PyObject *object) {
    Py_ssize_t count = PyTuple_Size(self->types);
    for (Py_ssize_t i = 0; i < count; i++)
        if ((PyObject *)Py_TYPE(object) == PyTuple_GetItem(self->types, i)) return 1;
    return 0;
}

/* Read a call's tensors; 0 if this table cannot serve them. Their shapes belong to them. */
static int see(const Table *self, int64_t tag, PyObject *const *objects, Py_ssize_t count, Seen *seen) {
    int64_t *word = seen->key;
    uint64_t hash = 0;
    seen->tensors = 0;
    *word++ = tag;
    if (count > MOST_TENSORS) return 0;
    for (Py_ssize_t i = 0; i < count; i++) {
        DLTensor *t = &seen->tensor[seen->tensors];
        if (objects[i] == Py_None) {
            *word++ = -1;
            continue;
        }
        if (!is_tensor(self, objects[i])) return 0;
        if (self->api->view(objects[i], t) != 0) {
            PyErr_Clear(); /* Python's path says what is wrong */
            return 0;
        }
        if (t->device.type != DLPACK_CUDA || t->ndim < 0 || t->ndim > MOST_DIMS || (t->ndim && t->strides == NULL))
            return 0;
        seen->tensors++;
        *word++ = (int64_t)t->dtype.code << 32 | (int64_t)t->dtype.bits << 16 | t->dtype.lanes;
        *word++ = t->device.id;
        *word++ = t->ndim;
        for (int32_t j = 0; j < t->ndim; j++) *word++ = t->shape[j];
        for (int32_t j = 0; j < t->ndim; j++) *word++ = t->strides[j];
    }
    seen->words = (uint32_t)(word - seen->key);
    for (uint32_t i = 0; i < seen->words; i++) {
        hash = (hash ^ (uint64_t)seen->key[i]) * 0x9E3779B97F4A7C15u;
        hash ^= hash >> 29;
    }
    seen->hash = hash;
    return 1;
}

/* Where the entry for `seen` is, or would be. */
static Entry **find(Table *self, const Seen *seen) {
    uint64_t place = seen->hash % BUCKETS;
    for (;; place = (place + 1) % BUCKETS) {
        Entry *entry = self->entries[place];
        if (entry == NULL) return &self->entries[place];
        if (entry->hash == seen->hash && entry->words == seen->words &&
            memcmp(entry->key, seen->key, seen->words * sizeof *seen->key) == 0)
            return &self->entries[place];
    }
}

static uint64_t address(const DLTensor *t) { return (uint64_t)(uintptr_t)t->data + t->byte_offset; }

/* Whether the pointers of a call are such as the plan was checked for. */
static int fits(const Entry *entry, const uint64_t *pointers) {
    uint64_t d = pointers[OUT], d_end = d + entry->bytes[OUT];
    for (uint32_t i = 0; i < entry->tensors; i++) {
        uint64_t p = pointers[i];
        if (p == 0 || p & entry->misaligned[i]) return 0;
        if (i != OUT && d < p + entry->bytes[i] && p < d_end) return 0;
    }
    return 1;
}

static void release(Entry *entry) {
    if (--entry->users > 0) return;
    for (uint32_t i = 0; i < entry->launches; i++) Py_DECREF(entry->launch[i]);
    Py_XDECREF(entry->shape);
    Py_XDECREF(entry->keywords);
    Py_DECREF(entry->counter);
    free(entry);
}

/* call(tag, stream, a, b, out, ...): the output if the launch is on its way, else None: then Python's path is to be
   taken, which finds out why. `stream` is None for the framework's current one, or an integer. */
static PyObject *table_call(PyObject *object, PyObject *const *args, Py_ssize_t count) {
    Table *self = (Table *)object;
    Seen seen;
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
    if (!see(self, tag, args + 2, count - 2, &seen)) Py_RETURN_NONE;
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
    for (uint32_t i = 0, j = 0; i < entry->tensors; i++)
        if (i == OUT && entry->shape != NULL) pointers[i] = 0;
        else pointers[i] = address(&seen.tensor[j++]);
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
        pointers[OUT] = address(&t);
    }
    if (!fits(entry, pointers)) goto python;
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

/* put(tag, (a, b, out, ...), launches, misaligned, bytes, device, shape, keywords, counter): serve such
   calls from now on; False if they are not of a kind that this can. A full table begins anew. `out` and its shape: one
   of both. */
static PyObject *table_put(PyObject *object, PyObject *args) {
    Table *self = (Table *)object;
    PyObject *tensors, *launches, *misaligned, *bytes, *shape, *keywords, *counter;
    PyObject *given[MOST_TENSORS];
    long long tag;
    int device;
    Seen seen;
    Entry *entry, *replaced, **place;
    Py_ssize_t count, launched, operands;
    if (!PyArg_ParseTuple(args, "LO!O!OOiOOO!", &tag, &PyTuple_Type, &tensors, &PyTuple_Type, &launches, &misaligned,
                          &bytes, &device, &shape, &keywords, counter_type, &counter))
        return NULL;
    count = PyTuple_Size(tensors);
    launched = PyTuple_Size(launches);
    if (count > MOST_TENSORS || launched == 0 || launched > MOST_LAUNCHES) Py_RETURN_FALSE;
    for (Py_ssize_t i = 0; i < count; i++) given[i] = PyTuple_GetItem(tensors, i);
    if (!see(self, tag, given, count, &seen)) Py_RETURN_FALSE;
    operands = seen.tensors + (shape != Py_None);
    for (Py_ssize_t i = 0; i < launched; i++) {
        PyObject *item = PyTuple_GetItem(launches, i);
        if (Py_TYPE(item) != launch_type || ((Launch *)item)->pointers != operands) Py_RETURN_FALSE;
    }
    if (self->count >= MOST_ENTRIES) clear(self);
    entry = calloc(1, sizeof *entry + seen.words * sizeof *seen.key);
    if (entry == NULL) return PyErr_NoMemory();
    entry->tensors = (uint32_t)operands;
    if (operands > MOST_TENSORS || integers(misaligned, entry->misaligned, MOST_TENSORS) != operands ||
        integers(bytes, entry->bytes, MOST_TENSORS) != operands) {
        free(entry);
        if (!PyErr_Occurred()) PyErr_SetString(PyExc_ValueError, "a wrong number of operands");
        return NULL;
    }
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
    {"put", table_put, METH_VARARGS, "put(tag, tensors, launches, misaligned, bytes, device, shape, keywords, counter)"},
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

/* --- what a kernel takes --- */

enum { MOST_ASKED = 256 };

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
    launch_type = (PyTypeObject *)PyType_FromSpec(&launch_spec);
    table_type = (PyTypeObject *)PyType_FromSpec(&table_spec);
    counter_type = (PyTypeObject *)PyType_FromSpec(&counter_spec);
    if (launch_type == NULL || table_type == NULL || counter_type == NULL ||
        PyModule_AddIntConstant(self, "INTERFACE", INTERFACE) < 0 ||
        PyModule_AddObject(self, "Launch", (PyObject *)launch_type) < 0 ||
        PyModule_AddObject(self, "Table", (PyObject *)table_type) < 0 ||
        PyModule_AddObject(self, "Counter", (PyObject *)counter_type) < 0 || add_program(self) < 0 ||
        add_costs(self) < 0) {
        Py_DECREF(self);
        return NULL;
    }
    Py_INCREF(launch_type); /* the globals' own */
    Py_INCREF(table_type);
    Py_INCREF(counter_type);
    return self;
}
