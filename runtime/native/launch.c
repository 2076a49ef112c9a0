/* Launches with no interpreter in them: pointers are written into a copy of the parameters, and cuLaunchKernelEx is
   called without its lock. The driver's functions come as addresses, so this is built without CUDA. */

#include "launch.h"

PyTypeObject *launch_type;

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

int launch_or_fail(Launch *self, const uint64_t *pointers, uint64_t stream) {
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
    parameters_given = read_integers(offsets, found, MOST_PARAMETERS);
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
    if (read_integers(shape, words, 7) != 7) goto wrong;
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
        Py_ssize_t found = item == NULL ? -1 : read_integers(item, words, ATTRIBUTE_WORDS + 1);
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
        count = item == NULL ? -1 : read_integers(item, words, 4);
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
    if (read_integers(args[0], pointers, MOST_TENSORS) != self->pointers) {
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

int add_launch(PyObject *module) {
    launch_type = (PyTypeObject *)PyType_FromSpec(&launch_spec);
    if (launch_type == NULL) return -1;
    Py_INCREF(launch_type); /* the global's own */
    return PyModule_AddObject(module, "Launch", (PyObject *)launch_type);
}
