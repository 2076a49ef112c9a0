/* Launch programs without Python: read, checked and evaluated as runtime/program.py and runtime/arithmetic.py do.

   What is read comes from an archive and is not trusted. Whatever is not as it must be, or is more than there is room
   for, makes `Program` None, and Python reads the program, or says what is wrong with it. So this accepts nothing that
   Python does not, and gives the same numbers. Values are unsigned integers modulo 2^width; poison is told apart. */

#include "_native.h"

enum { MOST_NODES = 20000, MOST_LOOP_ROUNDS = 256, MOST_VARIABLES = 16, MOST_INPUTS = 256 };
enum { MOST_LAUNCHES = 16, MOST_POINTERS = 256, MOST_WORDS_OF_ATTRIBUTE = 3, MOST_ATTRIBUTES = 4 };
enum { MOST_PARAMETER_BYTES = 32764, MOST_SHARED_BYTES = 256 * 1024, MOST_THREADS = 1024 };
static const uint64_t MOST_BLOCKS[3] = {2147483647, 65535, 65535};

enum Code {
    ADD, SUB, MUL, AND, OR, XOR, UDIV, SDIV, UREM, SREM, CEILDIVSI, FLOORDIVSI, SHL, LSHR, ASHR, UMIN, UMAX, SMIN, SMAX,
    EQ, NE, ULT, ULE, UGT, UGE, SLT, SLE, SGT, SGE,
    TRUNC, ZEXT, SEXT,
    CTLZ, ABS,
    CONST, SELECT, LOOP, CODES
};
static const char *const NAMES[CODES] = {
    "add", "sub", "mul", "and", "or", "xor", "udiv", "sdiv", "urem", "srem", "ceildivsi", "floordivsi", "shl", "lshr",
    "ashr", "umin", "umax", "smin", "smax", "eq", "ne", "ult", "ule", "ugt", "uge", "slt", "sle", "sgt", "sge", "trunc",
    "zext", "sext", "ctlz", "abs", "const", "select", "loop",
};
enum { LAST_BINARY = SMAX, LAST_COMPARISON = SGE, LAST_CAST = SEXT, LAST_FLAGGED = ABS };

/* Flags of LLVM: where what they promise does not hold, the result is poison. */
enum { NSW = 1, NUW = 2, EXACT = 4, DISJOINT = 8 };
static const struct { const char *name; uint8_t bit; uint64_t codes; } FLAGS[] = {
    {"nsw", NSW, 1ull << ADD | 1ull << SUB | 1ull << MUL | 1ull << SHL},
    {"nuw", NUW, 1ull << ADD | 1ull << SUB | 1ull << MUL | 1ull << SHL},
    {"exact", EXACT, 1ull << UDIV | 1ull << SDIV | 1ull << LSHR | 1ull << ASHR},
    {"disjoint", DISJOINT, 1ull << OR},
};

typedef struct {
    uint8_t code, width, source, flags; /* of a comparison or cast, `source` is the width of what it takes */
    uint32_t a, b, c;
    uint64_t constant; /* of a loop, which */
} Op;

typedef struct {
    uint32_t base, variables, rounds, result, test, head, head_ops, body, body_ops;
    uint32_t first[MOST_VARIABLES], next[MOST_VARIABLES];
} Loop;

typedef struct { uint32_t offset, bytes, ref; } Word;
typedef struct { uint32_t offset, pointer, addend; uint8_t tma; } PointerSlot;
typedef struct { uint32_t identity, words, ref[MOST_WORDS_OF_ATTRIBUTE]; } Attribute;

typedef struct {
    uint32_t kernel, grid[3], block[3], shared_bytes;
    uint32_t attributes, parameters, words, slots, total;
    Attribute attribute[MOST_ATTRIBUTES];
    uint32_t *offset, *size; /* of each parameter */
    Word *word; /* those that are not constant */
    PointerSlot *slot;
    unsigned char *template;
} Shape;

enum { NO_ADDEND = UINT32_MAX };

typedef struct {
    PyObject_HEAD
    uint32_t inputs, ops, loops, launches, scratch; /* scratch: the most values there are at a time, in a loop or not */
    uint8_t *widths; /* of the inputs */
    Op *op, *inner; /* inner: those of loops */
    Loop *loop;
    Shape launch[MOST_LAUNCHES];
} Program;

static PyTypeObject *program_type;

static uint64_t mask_of(unsigned width) { return width == 64 ? UINT64_MAX : (1ull << width) - 1; }

static int64_t signed_of(uint64_t value, unsigned width) {
    uint64_t sign = 1ull << (width - 1);
    return (int64_t)((value ^ sign) - sign);
}

/* --- reading; no Python code runs meanwhile, so borrowed references stay good --- */

typedef struct {
    Program *program;
    uint8_t *widths; /* of all values so far */
    uint32_t values, room, nodes, inner, op_room, inner_room, loop_room;
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
        if (strcmp(name, NAMES[code]) == 0) return code;
    return -1;
}

static int read_flags(PyObject *object, int code, uint8_t *out) {
    Py_ssize_t count = items(object);
    if (count < 0) return 0;
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
    if (!whole(PyList_GetItem(node, 2), 1, MOST_LOOP_ROUNDS, &rounds)) return 0;
    if (count < 1 || count > MOST_VARIABLES || items(next) != count) return 0;
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
    if (count < 0 || count > MOST_NODES - (Py_ssize_t)reader->nodes) return 0;
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
        if (items(item) != 2 || !whole(PyList_GetItem(item, 0), 0, UINT32_MAX, &identity)) return 0;
        if (identity != 2 && identity != 4 && identity != 6 && identity != 11) return 0;
        for (Py_ssize_t j = 0; j < i; j++)
            if (shape->attribute[j].identity == identity) return 0;
        attribute->identity = (uint32_t)identity;
        attribute->words = identity == 4 || identity == 11 ? 3 : 1; /* of cluster dimensions, and of flags */
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
    unsigned char taken[MOST_PARAMETER_BYTES];
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
    if (count < 0 || count > MOST_PARAMETER_BYTES) return 0;
    shape->offset = calloc((size_t)count + 1, sizeof *shape->offset);
    shape->size = calloc((size_t)count + 1, sizeof *shape->size);
    if (shape->offset == NULL || shape->size == NULL) return 0;
    for (Py_ssize_t i = 0; i < count; i++) {
        PyObject *item = PyList_GetItem(parameters, i);
        uint64_t size;
        if (!is_object(item, 3) || !whole(field(item, "size"), 1, MOST_PARAMETER_BYTES, &size)) return 0;
        sum += size;
        if (sum > MOST_PARAMETER_BYTES || !read_parameter(reader, item, size, pointers, shape)) return 0;
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
    if (count < 0 || count > MOST_INPUTS) return 0;
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
static PyObject *program_read(PyObject *unused, PyObject *args) {
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
    good = count >= 1 && count <= MOST_LAUNCHES && pointers <= MOST_POINTERS && read_inputs(&reader, widths) &&
           read_nodes(&reader, nodes, 0);
    for (Py_ssize_t i = 0; good && i < count; i++) {
        self->launches++; /* what it holds is freed with the program */
        good = read_launch(&reader, PyList_GetItem(launches, i), pointers, kernels, &self->launch[i]);
    }
    free(reader.widths);
    if (good) return (PyObject *)self;
    Py_DECREF(self);
    Py_RETURN_NONE;
}

/* --- evaluation --- */

/* As runtime/poison.py has them. */
enum Reason { ZERO = 1, QUOTIENT, SHIFT, NO_SIGNED, NO_UNSIGNED, SHARED_BITS, MULTIPLE, POWER, LEADING, ABSOLUTE, ENDLESS };
static const char *const REASONS[] = {
    "", "zero", "quotient", "shift", "nsw", "nuw", "disjoint", "multiple", "power", "ctlz", "abs", "loop",
};

typedef struct { uint8_t reason, code, width; uint64_t x, y; } Origin; /* of poison: an operation, and its operands */

typedef struct {
    uint64_t *value;
    uint32_t *poison; /* 0, or 1 + the number of the value that it comes from: this one or one before it */
    Origin *origin;   /* of the values that poison comes from */
} State;

static uint32_t poisoned(State *state, uint32_t number, int reason, const Op *op, uint64_t x, uint64_t y) {
    state->origin[number] = (Origin){(uint8_t)reason, op->code, op->width, x, y};
    return number + 1;
}

/* Which of LLVM's flags of `op` promises what does not hold, as the reason; 0 if none does. */
static int broken(const Op *op, uint64_t x, uint64_t y, uint64_t result) {
    unsigned width = op->width;
    if (op->flags & NSW) {
        __int128 sx = signed_of(x, width), sy = op->code == SHL ? (__int128)y : signed_of(y, width), exact;
        if (op->code == ADD) exact = sx + sy;
        else if (op->code == SUB) exact = sx - sy;
        else if (op->code == MUL) exact = sx * sy;
        else exact = sx * ((__int128)1 << y);
        if (exact != signed_of(result, width)) return NO_SIGNED;
    }
    if (op->flags & NUW) {
        unsigned __int128 exact;
        if (op->code == ADD) exact = (unsigned __int128)x + y;
        else if (op->code == SUB) exact = x < y ? ~(unsigned __int128)0 : x - y;
        else if (op->code == MUL) exact = (unsigned __int128)x * y;
        else exact = (unsigned __int128)x << y;
        if (exact != result) return NO_UNSIGNED;
    }
    if (op->flags & DISJOINT && x & y) return SHARED_BITS;
    if (op->flags & EXACT) {
        if (op->code == UDIV) return x % y ? MULTIPLE : 0;
        if (op->code == SDIV) return (__int128)signed_of(x, width) % signed_of(y, width) ? MULTIPLE : 0;
        return x & ((1ull << y) - 1) ? POWER : 0;
    }
    return 0;
}

/* x / y, rounded towards zero, up or down, or what remains; the reason if it is not defined. */
static int divide(const Op *op, uint64_t x, uint64_t y, uint64_t *result) {
    unsigned width = op->width;
    __int128 sx = signed_of(x, width), sy = signed_of(y, width), quotient;
    if (sy == 0) return ZERO;
    quotient = sx / sy;
    if (quotient * sy != sx) {
        int below = (sx < 0) != (sy < 0); /* so the quotient was rounded up */
        if (op->code == CEILDIVSI && !below) quotient++;
        if (op->code == FLOORDIVSI && below) quotient--;
    }
    if (quotient == (__int128)1 << (width - 1)) return QUOTIENT;
    *result = (uint64_t)(op->code == SREM ? sx - quotient * sy : quotient) & mask_of(width);
    return 0;
}

/* The result, and the reason if it is not defined. */
static int binary(const Op *op, uint64_t x, uint64_t y, uint64_t *result) {
    unsigned width = op->width;
    uint64_t mask = mask_of(width);
    switch (op->code) {
    case ADD: *result = (x + y) & mask; break;
    case SUB: *result = (x - y) & mask; break;
    case MUL: *result = (x * y) & mask; break;
    case AND: *result = x & y; break;
    case OR: *result = x | y; break;
    case XOR: *result = x ^ y; break;
    case UDIV:
        if (y == 0) return ZERO;
        *result = x / y;
        break;
    case UREM:
        if (y == 0) return ZERO;
        *result = x % y;
        break;
    case SHL:
        if (y >= width) return SHIFT;
        *result = (x << y) & mask;
        break;
    case LSHR:
        if (y >= width) return SHIFT;
        *result = x >> y;
        break;
    case ASHR:
        if (y >= width) return SHIFT;
        *result = (uint64_t)(signed_of(x, width) >> y) & mask;
        break;
    case UMIN: *result = x < y ? x : y; break;
    case UMAX: *result = x > y ? x : y; break;
    case SMIN: *result = signed_of(x, width) < signed_of(y, width) ? x : y; break;
    case SMAX: *result = signed_of(x, width) > signed_of(y, width) ? x : y; break;
    default: return divide(op, x, y, result);
    }
    return 0;
}

static uint64_t comparison(const Op *op, uint64_t x, uint64_t y) {
    int64_t sx = signed_of(x, op->source), sy = signed_of(y, op->source);
    switch (op->code) {
    case EQ: return x == y;
    case NE: return x != y;
    case ULT: return x < y;
    case ULE: return x <= y;
    case UGT: return x > y;
    case UGE: return x >= y;
    case SLT: return sx < sy;
    case SLE: return sx <= sy;
    case SGT: return sx > sy;
    default: return sx >= sy;
    }
}

static unsigned bits_of(uint64_t x) {
    unsigned bits = 0;
    for (; x; x >>= 1) bits++;
    return bits;
}

static int run_loop(const Program *self, const Op *op, State *state, uint64_t *result, uint32_t *poison);

/* The value of `op`, at `number`; -1 if it depends on poison as Python would not go on with, whose origin is the result. */
static int step(const Program *self, const Op *op, State *state, uint32_t number) {
    uint64_t x = state->value[op->a], y = state->value[op->b], result = 0;
    uint32_t poison = state->poison[op->a], other = state->poison[op->b];
    if (op->code <= LAST_COMPARISON) {
        if (!poison) poison = other;
        if (poison) ;
        else if (op->code > LAST_BINARY) result = comparison(op, x, y);
        else {
            int reason = binary(op, x, y, &result);
            if (reason == 0 && op->flags) reason = broken(op, x, y, result);
            if (reason) poison = poisoned(state, number, reason, op, x, y);
        }
    } else if (op->code == CONST) {
        result = op->constant;
        poison = 0;
    } else if (op->code == SELECT) {
        uint32_t chosen = x ? op->b : op->c;
        if (poison) return -(int)poison;
        result = state->value[chosen];
        poison = state->poison[chosen];
    } else if (op->code == TRUNC || op->code == ZEXT) result = x & mask_of(op->width);
    else if (op->code == SEXT) result = (uint64_t)signed_of(x, op->source) & mask_of(op->width);
    else if (op->code == LOOP) {
        int failed = run_loop(self, op, state, &result, &poison);
        if (failed) return failed;
        if (poison) { /* what is inside ends here, so it moves out */
            state->origin[number] = state->origin[poison - 1];
            poison = number + 1;
        }
    } else if (!poison && op->code == CTLZ) {
        if (x == 0 && op->constant) poison = poisoned(state, number, LEADING, op, x, 1);
        else result = op->width - bits_of(x);
    } else if (!poison) {
        uint64_t sign = 1ull << (op->width - 1);
        result = x & sign ? (0 - x) & mask_of(op->width) : x;
        if (x == sign && op->constant) poison = poisoned(state, number, ABSOLUTE, op, x, 1);
    }
    state->value[number] = result;
    state->poison[number] = poison;
    return 0;
}

static int run_loop(const Program *self, const Op *op, State *state, uint64_t *result, uint32_t *poison) {
    const Loop *loop = &self->loop[op->constant];
    uint64_t next[MOST_VARIABLES];
    uint32_t poisons[MOST_VARIABLES];
    Origin origins[MOST_VARIABLES];
    const uint32_t *from = loop->first;
    for (uint32_t round = 0;; round++) {
        uint32_t number = loop->base + loop->variables;
        for (uint32_t i = 0; i < loop->variables; i++) {
            next[i] = state->value[from[i]];
            poisons[i] = state->poison[from[i]];
            if (poisons[i]) {
                origins[i] = state->origin[poisons[i] - 1];
                poisons[i] = loop->base + i + 1;
            }
        }
        for (uint32_t i = 0; i < loop->variables; i++)
            if (poisons[i]) state->origin[loop->base + i] = origins[i];
        memcpy(state->value + loop->base, next, loop->variables * sizeof *next);
        memcpy(state->poison + loop->base, poisons, loop->variables * sizeof *poisons);
        if (round == loop->rounds) {
            *poison = poisoned(state, loop->base, ENDLESS, op, loop->rounds, 0);
            return 0;
        }
        for (uint32_t i = 0; i < loop->head_ops; i++) {
            int failed = step(self, &self->inner[loop->head + i], state, number++);
            if (failed) return failed;
        }
        if (state->poison[loop->test]) {
            *poison = state->poison[loop->test];
            return 0;
        }
        if (!state->value[loop->test]) {
            *result = next[loop->result];
            *poison = poisons[loop->result];
            return 0;
        }
        for (uint32_t i = 0; i < loop->body_ops; i++) {
            int failed = step(self, &self->inner[loop->body + i], state, number++);
            if (failed) return failed;
        }
        from = loop->next;
    }
}

/* ("poison", reason, operation, width, operands...). */
static PyObject *poison_said(const State *state, uint32_t poison) {
    const Origin *origin = &state->origin[poison - 1];
    return Py_BuildValue("(sssIKK)", "poison", REASONS[origin->reason], NAMES[origin->code], (unsigned)origin->width,
                         (unsigned long long)origin->x, (unsigned long long)origin->y);
}

static uint32_t first_poison(const State *state, const uint32_t *refs, uint32_t count) {
    for (uint32_t i = 0; i < count; i++)
        if (state->poison[refs[i]]) return state->poison[refs[i]];
    return 0;
}

static PyObject *three(const State *state, const uint32_t *refs) {
    const uint64_t *v = state->value;
    return Py_BuildValue("(III)", (unsigned)v[refs[0]], (unsigned)v[refs[1]], (unsigned)v[refs[2]]);
}

static PyObject *attributes_of(const Shape *shape, const State *state) {
    PyObject *all = PyTuple_New(shape->attributes);
    for (uint32_t i = 0; all != NULL && i < shape->attributes; i++) {
        const Attribute *attribute = &shape->attribute[i];
        PyObject *words = attribute->words == 3 ? three(state, attribute->ref)
                                                : Py_BuildValue("(I)", (unsigned)state->value[attribute->ref[0]]);
        PyObject *item = words == NULL ? NULL : Py_BuildValue("(IN)", (unsigned)attribute->identity, words);
        if (item == NULL || PyTuple_SetItem(all, i, item) < 0) {
            Py_DECREF(all);
            return NULL;
        }
    }
    return all;
}

static PyObject *addends_of(const Shape *shape, const State *state) {
    PyObject *all = PyTuple_New(shape->slots);
    for (uint32_t i = 0; all != NULL && i < shape->slots; i++) {
        uint32_t ref = shape->slot[i].addend;
        PyObject *item = PyLong_FromLongLong(ref == NO_ADDEND ? 0 : (int64_t)state->value[ref]);
        if (item == NULL || PyTuple_SetItem(all, i, item) < 0) {
            Py_DECREF(all);
            return NULL;
        }
    }
    return all;
}

/* What is wrong with this launch, in the order in which Python looks; Py_None if nothing is. */
static PyObject *wrong_with(const Shape *shape, const State *state) {
    const uint64_t *v = state->value;
    uint64_t threads = 1;
    uint32_t poison = first_poison(state, shape->grid, 3);
    if (poison) return poison_said(state, poison);
    for (int i = 0; i < 3; i++)
        if (v[shape->grid[i]] < 1 || v[shape->grid[i]] > MOST_BLOCKS[i])
            return Py_BuildValue("(sN)", "grid", three(state, shape->grid));
    poison = first_poison(state, shape->block, 3);
    if (poison) return poison_said(state, poison);
    for (int i = 0; i < 3; i++) {
        threads *= v[shape->block[i]]; /* at most 1024 * 2^32 */
        if (threads < 1 || threads > MOST_THREADS) return Py_BuildValue("(sN)", "block", three(state, shape->block));
    }
    poison = state->poison[shape->shared_bytes];
    if (poison) return poison_said(state, poison);
    if (v[shape->shared_bytes] > MOST_SHARED_BYTES)
        return Py_BuildValue("(sK)", "shared_bytes", (unsigned long long)v[shape->shared_bytes]);
    for (uint32_t i = 0; i < shape->words; i++)
        if (state->poison[shape->word[i].ref]) return poison_said(state, state->poison[shape->word[i].ref]);
    for (uint32_t i = 0; i < shape->attributes; i++) {
        poison = first_poison(state, shape->attribute[i].ref, shape->attribute[i].words);
        if (poison) return poison_said(state, poison);
    }
    for (uint32_t i = 0; i < shape->slots; i++) {
        uint32_t ref = shape->slot[i].addend;
        if (ref != NO_ADDEND && state->poison[ref]) return poison_said(state, state->poison[ref]);
    }
    Py_RETURN_NONE;
}

/* (grid, block, shared bytes, attributes, parameters, the addend of each slot) */
static PyObject *launch_of(const Shape *shape, const State *state) {
    PyObject *parameters = PyBytes_FromStringAndSize((const char *)shape->template, shape->total);
    PyObject *grid, *block, *attributes, *addends;
    char *bytes;
    if (parameters == NULL) return NULL;
    bytes = PyBytes_AsString(parameters);
    for (uint32_t i = 0; i < shape->words; i++)
        memcpy(bytes + shape->word[i].offset, &state->value[shape->word[i].ref], shape->word[i].bytes);
    grid = three(state, shape->grid);
    block = three(state, shape->block);
    attributes = attributes_of(shape, state);
    addends = addends_of(shape, state);
    if (grid == NULL || block == NULL || attributes == NULL || addends == NULL) {
        Py_XDECREF(grid);
        Py_XDECREF(block);
        Py_XDECREF(attributes);
        Py_XDECREF(addends);
        Py_DECREF(parameters);
        return NULL;
    }
    return Py_BuildValue("(NNKNNN)", grid, block, (unsigned long long)state->value[shape->shared_bytes], attributes,
                         parameters, addends);
}

/* An input as the unsigned integer its bits make; 0 if it does not fit `width` bits. */
static int input(PyObject *object, unsigned width, uint64_t *out) {
    int overflow;
    long long number;
    if (!PyLong_Check(object)) return 0;
    number = PyLong_AsLongLongAndOverflow(object, &overflow);
    if (overflow < 0 || (number == -1 && PyErr_Occurred())) return 0;
    if (overflow > 0) {
        *out = PyLong_AsUnsignedLongLong(object);
        if (PyErr_Occurred()) return 0;
        return width == 64;
    }
    if (width < 64 && (number < -(1ll << (width - 1)) || number > (long long)mask_of(width))) return 0;
    *out = (uint64_t)number & mask_of(width);
    return 1;
}

/* evaluate((inputs...)): a list of its launches, or a tuple that says why there are none. */
static PyObject *program_evaluate(PyObject *object, PyObject *inputs) {
    const Program *self = (const Program *)object;
    size_t values = (size_t)self->scratch + 1;
    State state;
    PyObject *result = NULL;
    if (!PyTuple_Check(inputs) || PyTuple_Size(inputs) != self->inputs) {
        PyErr_SetString(PyExc_TypeError, "evaluate((inputs...)), as many as there are");
        return NULL;
    }
    state.origin = malloc(values * (sizeof *state.origin + sizeof *state.value + sizeof *state.poison));
    if (state.origin == NULL) return PyErr_NoMemory();
    state.value = (uint64_t *)(state.origin + values);
    state.poison = (uint32_t *)(state.value + values);
    memset(state.value, 0, values * (sizeof *state.value + sizeof *state.poison));
    for (uint32_t i = 0; i < self->inputs; i++)
        if (!input(PyTuple_GetItem(inputs, i), self->widths[i], &state.value[i])) {
            PyErr_Clear();
            result = Py_BuildValue("(sI)", "input", (unsigned)i);
            goto end;
        }
    for (uint32_t i = 0; i < self->ops; i++) {
        int failed = step(self, &self->op[i], &state, self->inputs + i);
        if (failed) {
            result = poison_said(&state, (uint32_t)-failed);
            goto end;
        }
    }
    result = PyList_New(0);
    for (uint32_t i = 0; result != NULL && i < self->launches; i++) {
        PyObject *item = wrong_with(&self->launch[i], &state);
        if (item != Py_None) { /* what is wrong, or an error */
            Py_DECREF(result);
            result = item;
            break;
        }
        Py_DECREF(item);
        item = launch_of(&self->launch[i], &state);
        if (item == NULL || PyList_Append(result, item) < 0) Py_CLEAR(result);
        Py_XDECREF(item);
    }
end:
    free(state.origin);
    return result;
}

/* Of each launch (kernel, (attribute...), (offset...), (size...), ((offset, tma, pointer)...)). */
static PyObject *program_shapes(PyObject *object, PyObject *unused) {
    const Program *self = (const Program *)object;
    PyObject *all = PyList_New(0);
    (void)unused;
    for (uint32_t i = 0; all != NULL && i < self->launches; i++) {
        const Shape *shape = &self->launch[i];
        PyObject *attributes = PyTuple_New(shape->attributes), *offsets = PyTuple_New(shape->parameters);
        PyObject *sizes = PyTuple_New(shape->parameters), *slots = PyTuple_New(shape->slots), *item = NULL;
        int good = attributes != NULL && offsets != NULL && sizes != NULL && slots != NULL;
        for (uint32_t j = 0; good && j < shape->attributes; j++)
            good = PyTuple_SetItem(attributes, j, PyLong_FromUnsignedLong(shape->attribute[j].identity)) == 0;
        for (uint32_t j = 0; good && j < shape->parameters; j++)
            good = PyTuple_SetItem(offsets, j, PyLong_FromUnsignedLong(shape->offset[j])) == 0 &&
                   PyTuple_SetItem(sizes, j, PyLong_FromUnsignedLong(shape->size[j])) == 0;
        for (uint32_t j = 0; good && j < shape->slots; j++) {
            const PointerSlot *slot = &shape->slot[j];
            good = PyTuple_SetItem(slots, j, Py_BuildValue("(INI)", slot->offset, PyBool_FromLong(slot->tma),
                                                           slot->pointer)) == 0;
        }
        if (good && !PyErr_Occurred())
            item = Py_BuildValue("(IOOOO)", shape->kernel, attributes, offsets, sizes, slots);
        Py_XDECREF(attributes);
        Py_XDECREF(offsets);
        Py_XDECREF(sizes);
        Py_XDECREF(slots);
        if (item == NULL || PyList_Append(all, item) < 0) Py_CLEAR(all);
        Py_XDECREF(item);
    }
    return all;
}

static void program_dealloc(PyObject *object) {
    PyTypeObject *type = Py_TYPE(object);
    Program *self = (Program *)object;
    for (uint32_t i = 0; i < self->launches; i++) {
        Shape *shape = &self->launch[i];
        free(shape->offset);
        free(shape->size);
        free(shape->word);
        free(shape->slot);
        free(shape->template);
    }
    free(self->widths);
    free(self->op);
    free(self->inner);
    free(self->loop);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(object);
    Py_DECREF(type);
}

static PyMethodDef program_methods[] = {
    {"read", program_read, METH_VARARGS | METH_STATIC, "read(widths, nodes, launches, pointers, kernels)"},
    {"evaluate", program_evaluate, METH_O, "evaluate(inputs)"},
    {"shapes", program_shapes, METH_NOARGS, "shapes()"},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot program_slots[] = {{Py_tp_dealloc, program_dealloc}, {Py_tp_methods, program_methods}, {0, NULL}};

static PyType_Spec program_spec = {"runtime._native.Program", sizeof(Program), 0, Py_TPFLAGS_DEFAULT, program_slots};

int add_program(PyObject *module) {
    program_type = (PyTypeObject *)PyType_FromSpec(&program_spec);
    if (program_type == NULL) return -1;
    Py_INCREF(program_type); /* the global's own */
    return PyModule_AddObject(module, "Program", (PyObject *)program_type);
}
