/* Launch programs without Python: how they are read and checked, as runtime/program/evaluator.py and runtime/program/arithmetic.py do.

   What is read comes from an archive and is not trusted. Whatever is not as it must be, or is more than there is room
   for (runtime/limits.py, for both), makes `Program.read` None, and Python says what is wrong with it. So this accepts
   nothing that Python does not. No Python code runs meanwhile, so borrowed references stay good. */

#include "program.h"

/* Of a launch, by their CUlaunchAttributeID, as runtime/device/launch.py has them. */
enum { COOPERATIVE = 2, CLUSTER_DIMENSION = 4, PROGRAMMATIC_STREAM_SERIALIZATION = 6, PREFERRED_CLUSTER_DIMENSION = 11 };

static const struct { const char *name; uint8_t bit; uint64_t codes; } FLAGS[] = {
    {"nsw", NSW, 1ull << ADD | 1ull << SUB | 1ull << MUL | 1ull << SHL},
    {"nuw", NUW, 1ull << ADD | 1ull << SUB | 1ull << MUL | 1ull << SHL},
    {"exact", EXACT, 1ull << UDIV | 1ull << SDIV | 1ull << LSHR | 1ull << ASHR},
    {"disjoint", DISJOINT, 1ull << OR},
};

typedef struct {
    Program *program;
    uint8_t *widths; /* of all values so far */
    uint32_t values, room, nodes, steps, inner, op_room, inner_room, loop_room;
} Reader;

static int whole(PyObject *object, uint64_t least, uint64_t most, uint64_t *out) {
    if (object == NULL || !PyLong_CheckExact(object)) return 0;
    *out = PyLong_AsUnsignedLongLong(object);
    if (PyErr_Occurred()) {
        PyErr_Clear();
        return 0;
    }
    return *out >= least && *out <= most;
}

/* The items of a list; -1 if it is none. */
static Py_ssize_t items(PyObject *object) {
    return object != NULL && PyList_CheckExact(object) ? PyList_Size(object) : -1;
}

/* Room for `needed` items; 0 if there is no memory, and Python may find some. */
static int grow(void **array, uint32_t *room, uint32_t needed, size_t size) {
    uint32_t wanted = *room ? *room : 64;
    void *larger;
    if (needed <= *room) return 1;
    while (wanted < needed) wanted *= 2;
    larger = realloc(*array, wanted * size);
    if (larger == NULL) return 0;
    *array = larger;
    *room = wanted;
    return 1;
}

static int reference(const Reader *reader, PyObject *object, unsigned width, uint32_t *out) {
    uint64_t number;
    if (!whole(object, 0, UINT32_MAX, &number) || number >= reader->values) return 0;
    if (width != 0 && reader->widths[number] != width) return 0;
    *out = (uint32_t)number;
    return 1;
}

static int define(Reader *reader, unsigned width) {
    if (!grow((void **)&reader->widths, &reader->room, reader->values + 1, sizeof *reader->widths)) return 0;
    reader->widths[reader->values++] = (uint8_t)width;
    if (reader->values > reader->program->scratch) reader->program->scratch = reader->values;
    return 1;
}

/* The characters of a string without NUL among them; NULL if it is none. */
static const char *word(PyObject *object) {
    Py_ssize_t size = 0;
    const char *text = PyUnicode_CheckExact(object) ? PyUnicode_AsUTF8AndSize(object, &size) : NULL;
    if (text == NULL) PyErr_Clear();
    return text != NULL && strlen(text) == (size_t)size ? text : NULL;
}

static int code_of(PyObject *object) {
    const char *name = word(object);
    if (name == NULL) return -1;
    for (int code = 0; code < CODES; code++)
        if (*name == *program_operations[code] && strcmp(name, program_operations[code]) == 0) return code;
    return -1;
}

static int read_flags(PyObject *object, int code, uint8_t *out) {
    Py_ssize_t count = items(object);
    if (count < 0 || count > MOST_FLAGS) return 0;
    for (Py_ssize_t i = 0; i < count; i++) {
        const char *name = word(PyList_GetItem(object, i));
        uint8_t found = 0;
        if (name == NULL) return 0;
        for (size_t j = 0; j < sizeof FLAGS / sizeof *FLAGS; j++)
            if (strcmp(name, FLAGS[j].name) == 0 && FLAGS[j].codes >> code & 1) found = FLAGS[j].bit;
        if (found == 0) return 0;
        if (found == NSW && *out & NUW) return 0; /* what is said is of the first that does not hold */
        *out |= found;
    }
    return 1;
}

static int read_nodes(Reader *reader, PyObject *nodes, int in_loop);

/* ["loop", width, limit, result, [initial...], [head nodes...], test, [body nodes...], [next...]] */
static int read_loop(Reader *reader, PyObject *node, Op *op) {
    Program *program = reader->program;
    uint64_t rounds, result;
    Loop loop = {.base = reader->values};
    PyObject *first = PyList_GetItem(node, 4), *next = PyList_GetItem(node, 8);
    Py_ssize_t count = items(first);
    if (!whole(PyList_GetItem(node, 2), 1, MAX_LOOP_ROUNDS, &rounds)) return 0;
    if (count < 1 || count > MAX_LOOP_VARIABLES || items(next) != count) return 0;
    if (program->loops == MAX_LOOPS) return 0;
    loop.rounds = (uint32_t)rounds;
    loop.variables = (uint32_t)count;
    for (uint32_t i = 0; i < loop.variables; i++)
        if (!reference(reader, PyList_GetItem(first, i), 0, &loop.first[i])) return 0;
    for (uint32_t i = 0; i < loop.variables; i++)
        if (!define(reader, reader->widths[loop.first[i]])) return 0;
    loop.head = reader->inner;
    if (!read_nodes(reader, PyList_GetItem(node, 5), 1)) return 0;
    loop.head_ops = reader->inner - loop.head;
    if (!reference(reader, PyList_GetItem(node, 6), 1, &loop.test)) return 0;
    loop.body = reader->inner;
    if (!read_nodes(reader, PyList_GetItem(node, 7), 1)) return 0;
    loop.body_ops = reader->inner - loop.body;
    for (uint32_t i = 0; i < loop.variables; i++)
        if (!reference(reader, PyList_GetItem(next, i), reader->widths[loop.first[i]], &loop.next[i])) return 0;
    if (!whole(PyList_GetItem(node, 3), 0, loop.variables - 1, &result)) return 0;
    loop.result = (uint32_t)result;
    if (reader->widths[loop.first[result]] != op->width) return 0;
    reader->steps += loop.rounds * (1 + loop.variables + loop.head_ops + loop.body_ops); /* 256 * 8,209 at most */
    if (reader->steps > MAX_LOOP_STEPS) return 0;
    reader->values = loop.base; /* what is inside ends there */
    if (!grow((void **)&program->loop, &reader->loop_room, program->loops + 1, sizeof loop)) return 0;
    op->constant = program->loops;
    program->loop[program->loops++] = loop;
    return 1;
}

static int read_node(Reader *reader, PyObject *node, int in_loop, Op *op) {
    Py_ssize_t count = items(node);
    uint64_t number;
    int code;
    if (count < 3) return 0;
    code = code_of(PyList_GetItem(node, 0));
    if (code < 0 || !whole(PyList_GetItem(node, 1), 1, 64, &number)) return 0;
    if (number != 1 && number != 8 && number != 16 && number != 32 && number != 64) return 0;
    *op = (Op){.code = (uint8_t)code, .width = (uint8_t)number};
    if (code <= LAST_BINARY) {
        if (count != 4 && count != 5) return 0;
        if (count == 5 && !read_flags(PyList_GetItem(node, 4), code, &op->flags)) return 0;
        return reference(reader, PyList_GetItem(node, 2), op->width, &op->a) &&
               reference(reader, PyList_GetItem(node, 3), op->width, &op->b);
    }
    if (code <= LAST_COMPARISON) {
        if (count != 4 || op->width != 1 || !reference(reader, PyList_GetItem(node, 2), 0, &op->a)) return 0;
        op->source = reader->widths[op->a];
        return reference(reader, PyList_GetItem(node, 3), op->source, &op->b);
    }
    if (code <= LAST_CAST) {
        if (count != 3 || !reference(reader, PyList_GetItem(node, 2), 0, &op->a)) return 0;
        op->source = reader->widths[op->a];
        return code == TRUNC ? op->width < op->source : op->width > op->source;
    }
    if (code <= LAST_FLAGGED) {
        if (count != 4 || !whole(PyList_GetItem(node, 3), 0, 1, &op->constant)) return 0;
        return reference(reader, PyList_GetItem(node, 2), op->width, &op->a);
    }
    if (code == CONST) return count == 3 && whole(PyList_GetItem(node, 2), 0, mask_of(op->width), &op->constant);
    if (code == SELECT)
        return count == 5 && reference(reader, PyList_GetItem(node, 2), 1, &op->a) &&
               reference(reader, PyList_GetItem(node, 3), op->width, &op->b) &&
               reference(reader, PyList_GetItem(node, 4), op->width, &op->c);
    return count == 9 && !in_loop && read_loop(reader, node, op);
}

static int read_nodes(Reader *reader, PyObject *nodes, int in_loop) {
    Program *program = reader->program;
    Py_ssize_t count = items(nodes);
    if (count < 0 || count > MAX_NODES - (Py_ssize_t)reader->nodes) return 0;
    reader->nodes += (uint32_t)count;
    for (Py_ssize_t i = 0; i < count; i++) {
        Op op;
        if (!read_node(reader, PyList_GetItem(nodes, i), in_loop, &op) || !define(reader, op.width)) return 0;
        if (in_loop) {
            if (!grow((void **)&program->inner, &reader->inner_room, reader->inner + 1, sizeof op)) return 0;
            program->inner[reader->inner++] = op;
        } else {
            if (!grow((void **)&program->op, &reader->op_room, program->ops + 1, sizeof op)) return 0;
            program->op[program->ops++] = op;
        }
    }
    return 1;
}

static int references(const Reader *reader, PyObject *list, Py_ssize_t count, unsigned width, uint32_t *out) {
    if (items(list) != count) return 0;
    for (Py_ssize_t i = 0; i < count; i++)
        if (!reference(reader, PyList_GetItem(list, i), width, &out[i])) return 0;
    return 1;
}

/* Field `name` of a dictionary that was found to have as many as it must. */
static PyObject *field(PyObject *object, const char *name) { return PyDict_GetItemString(object, name); }

static int is_object(PyObject *object, Py_ssize_t fields) {
    return object != NULL && PyDict_CheckExact(object) && PyDict_Size(object) == fields;
}

static int read_attributes(const Reader *reader, PyObject *list, Shape *shape) {
    Py_ssize_t count = items(list);
    if (count < 0 || count > MOST_ATTRIBUTES) return 0;
    for (Py_ssize_t i = 0; i < count; i++) {
        PyObject *item = PyList_GetItem(list, i);
        Attribute *attribute = &shape->attribute[i];
        uint64_t identity;
        int of_clusters;
        if (items(item) != 2 || !whole(PyList_GetItem(item, 0), 0, UINT32_MAX, &identity)) return 0;
        of_clusters = identity == CLUSTER_DIMENSION || identity == PREFERRED_CLUSTER_DIMENSION;
        if (!of_clusters && identity != COOPERATIVE && identity != PROGRAMMATIC_STREAM_SERIALIZATION) return 0;
        for (Py_ssize_t j = 0; j < i; j++)
            if (shape->attribute[j].identity == identity) return 0;
        attribute->identity = (uint32_t)identity;
        attribute->words = of_clusters ? 3 : 1;
        if (!references(reader, PyList_GetItem(item, 1), attribute->words, 32, attribute->ref)) return 0;
    }
    shape->attributes = (uint32_t)count;
    return 1;
}

/* Whether `bytes` bytes from `offset` on are free, which they are no longer then. */
static int take(unsigned char *taken, uint64_t offset, uint64_t bytes) {
    for (uint64_t i = offset; i < offset + bytes; i++)
        if (taken[i]++) return 0;
    return 1;
}

static int read_parameter(const Reader *reader, PyObject *item, uint64_t size, uint64_t pointers, Shape *shape) {
    PyObject *words = field(item, "words"), *slots = field(item, "slots");
    Py_ssize_t count = items(words), slot_count = items(slots);
    unsigned char taken[MAX_PARAMETER_BYTES];
    void *larger;
    if (count < 0 || slot_count < 0 || (uint64_t)count > size || (uint64_t)slot_count > size) return 0;
    memset(taken, 0, size);
    larger = realloc(shape->word, (shape->words + (size_t)count + 1) * sizeof *shape->word);
    if (larger == NULL) return 0;
    shape->word = larger;
    larger = realloc(shape->slot, (shape->slots + (size_t)slot_count + 1) * sizeof *shape->slot);
    if (larger == NULL) return 0;
    shape->slot = larger;
    for (Py_ssize_t i = 0; i < count; i++) {
        PyObject *word = PyList_GetItem(words, i);
        uint64_t offset, bytes;
        uint32_t ref;
        if (items(word) != 3 || !whole(PyList_GetItem(word, 1), 1, 8, &bytes) || bytes > size) return 0;
        if (bytes != 1 && bytes != 2 && bytes != 4 && bytes != 8) return 0;
        if (!whole(PyList_GetItem(word, 0), 0, size - bytes, &offset)) return 0;
        if (!reference(reader, PyList_GetItem(word, 2), 0, &ref) || !take(taken, offset, bytes)) return 0;
        if (reader->widths[ref] != 8 * bytes && !(bytes == 1 && reader->widths[ref] == 1)) return 0;
        shape->word[shape->words++] = (Word){shape->total + (uint32_t)offset, (uint32_t)bytes, ref};
    }
    for (Py_ssize_t i = 0; i < slot_count; i++) {
        PyObject *slot = PyList_GetItem(slots, i), *kind, *addend;
        PointerSlot *found = &shape->slot[shape->slots];
        uint64_t offset, pointer;
        if (items(slot) != 4 || size < 8) return 0;
        kind = PyList_GetItem(slot, 1);
        addend = PyList_GetItem(slot, 3);
        if (!PyUnicode_CheckExact(kind)) return 0;
        found->tma = PyUnicode_CompareWithASCIIString(kind, "tma") == 0;
        if (!found->tma && PyUnicode_CompareWithASCIIString(kind, "raw") != 0) return 0;
        if (!whole(PyList_GetItem(slot, 0), 0, size - 8, &offset) || offset % 8) return 0;
        if (pointers == 0 || !whole(PyList_GetItem(slot, 2), 0, pointers - 1, &pointer)) return 0;
        found->addend = NO_ADDEND;
        if (addend != Py_None && !reference(reader, addend, 64, &found->addend)) return 0;
        if (!take(taken, offset, 8)) return 0;
        found->offset = shape->total + (uint32_t)offset;
        found->pointer = (uint32_t)pointer;
        shape->slots++;
    }
    return 1;
}

static int read_launch(const Reader *reader, PyObject *object, uint64_t pointers, uint64_t kernels, Shape *shape) {
    const Program *program = reader->program;
    PyObject *parameters;
    Py_ssize_t count;
    uint64_t kernel, sum = 0;
    uint32_t changing = 0;
    if (!is_object(object, 6) || kernels == 0 || !whole(field(object, "kernel"), 0, kernels - 1, &kernel)) return 0;
    shape->kernel = (uint32_t)kernel;
    if (!references(reader, field(object, "grid"), 3, 32, shape->grid) ||
        !references(reader, field(object, "block"), 3, 32, shape->block) ||
        !reference(reader, field(object, "shared_bytes"), 64, &shape->shared_bytes) ||
        !read_attributes(reader, field(object, "attributes"), shape))
        return 0;
    parameters = field(object, "parameters");
    count = items(parameters);
    if (count < 0 || count > MAX_PARAMETERS) return 0;
    shape->offset = calloc((size_t)count + 1, sizeof *shape->offset);
    shape->size = calloc((size_t)count + 1, sizeof *shape->size);
    if (shape->offset == NULL || shape->size == NULL) return 0;
    for (Py_ssize_t i = 0; i < count; i++) {
        PyObject *item = PyList_GetItem(parameters, i);
        uint64_t size;
        if (!is_object(item, 3) || !whole(field(item, "size"), 1, MAX_PARAMETER_BYTES, &size)) return 0;
        sum += size;
        if (sum > MAX_PARAMETER_BYTES || !read_parameter(reader, item, size, pointers, shape)) return 0;
        shape->offset[i] = shape->total;
        shape->size[i] = (uint32_t)size;
        shape->total += ((uint32_t)size + 15) / 16 * 16;
    }
    shape->parameters = (uint32_t)count;
    shape->template = calloc((size_t)shape->total + 1, 1);
    if (shape->template == NULL) return 0;
    for (uint32_t i = 0; i < shape->words; i++) {
        Word word = shape->word[i];
        const Op *op = word.ref < program->inputs ? NULL : &program->op[word.ref - program->inputs];
        if (op != NULL && op->code == CONST)
            memcpy(shape->template + word.offset, &op->constant, word.bytes); /* little-endian, as all hosts of CUDA */
        else shape->word[changing++] = word;
    }
    shape->words = changing;
    return 1;
}

static int read_inputs(Reader *reader, PyObject *widths) {
    Program *program = reader->program;
    Py_ssize_t count = items(widths);
    if (count < 0 || count > MAX_INPUTS) return 0;
    program->inputs = (uint32_t)count;
    program->widths = calloc((size_t)count + 1, 1);
    if (program->widths == NULL) return 0;
    for (Py_ssize_t i = 0; i < count; i++) {
        uint64_t width;
        if (!whole(PyList_GetItem(widths, i), 1, 64, &width) || !define(reader, (unsigned)width)) return 0;
        program->widths[i] = (uint8_t)width;
    }
    return 1;
}

/* Program.read([width of each input...], nodes, launches, number of pointers, number of kernels): None if it is not to
   be read here. */
PyObject *program_read(PyObject *unused, PyObject *args) {
    PyObject *widths, *nodes, *launches;
    unsigned long long pointers, kernels;
    Py_ssize_t count;
    Program *self;
    Reader reader = {0};
    int good;
    (void)unused;
    if (!PyArg_ParseTuple(args, "OOOKK", &widths, &nodes, &launches, &pointers, &kernels)) return NULL;
    self = (Program *)((allocfunc)PyType_GetSlot(program_type, Py_tp_alloc))(program_type, 0);
    if (self == NULL) return NULL;
    reader.program = self;
    count = items(launches);
    good = count >= 1 && count <= MAX_LAUNCHES && pointers <= MAX_POINTERS && read_inputs(&reader, widths) &&
           read_nodes(&reader, nodes, 0);
    for (Py_ssize_t i = 0; good && i < count; i++) {
        self->launches++; /* what it holds is freed with the program */
        good = read_launch(&reader, PyList_GetItem(launches, i), pointers, kernels, &self->launch[i]);
        self->steps += self->launch[i].words + self->launch[i].slots;
    }
    free(reader.widths);
    self->steps += self->ops + reader.steps;
    if (good) return (PyObject *)self;
    Py_DECREF(self);
    Py_RETURN_NONE;
}
