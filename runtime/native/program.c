/* Launch programs without Python: how they are evaluated, as runtime/program/evaluator.py and runtime/program/arithmetic.py do, to the
   same numbers. Values are unsigned integers modulo 2^width; poison is told apart. */

#include "program.h"

static const uint64_t MAX_GRID[3] = {MAX_GRID_X, MAX_GRID_Y, MAX_GRID_Z};

PyTypeObject *program_type;

const char *const program_operations[CODES] = {
    "add", "sub", "mul", "and", "or", "xor", "udiv", "sdiv", "urem", "srem", "ceildivsi", "floordivsi", "shl", "lshr",
    "ashr", "umin", "umax", "smin", "smax", "eq", "ne", "ult", "ule", "ugt", "uge", "slt", "sle", "sgt", "sge", "trunc",
    "zext", "sext", "ctlz", "abs", "const", "select", "loop",
};

static int64_t signed_of(uint64_t value, unsigned width) {
    uint64_t sign = 1ull << (width - 1);
    return (int64_t)((value ^ sign) - sign);
}

/* As runtime/program/poison.py has them. */
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

enum { FEW = 256 }; /* values that are on the stack, as those of GEMMs are: memory that was not used yet takes longer */

static uint32_t poisoned(State *state, uint32_t number, int reason, const Op *op, uint64_t x, uint64_t y) {
    state->origin[number] = (Origin){(uint8_t)reason, op->code, op->width, x, y};
    return number + 1;
}

/* x / y and x % y of any y but 0, also where the quotient is 2^63. By a division of 64 bits: one of 128 is a call into the
   compiler's own library, which of some compilers brings a log and an exp that are not libm's, and not Python's. */
static __int128 quotient_of(int64_t x, int64_t y) { return y == -1 ? -(__int128)x : x / y; }
static int64_t remainder_of(int64_t x, int64_t y) { return y == -1 ? 0 : x % y; }

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
        if (op->code == SDIV) return remainder_of(signed_of(x, width), signed_of(y, width)) ? MULTIPLE : 0;
        return x & ((1ull << y) - 1) ? POWER : 0;
    }
    return 0;
}

/* x / y, rounded towards zero, up or down, or what remains; the reason if it is not defined. */
static int divide(const Op *op, uint64_t x, uint64_t y, uint64_t *result) {
    unsigned width = op->width;
    int64_t sx = signed_of(x, width), sy = signed_of(y, width);
    if (sy == 0) return ZERO;
    __int128 quotient = quotient_of(sx, sy);
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

/* Compute `op`, at `number`; minus the poison if it depends on some as Python would not go on with. */
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
    uint64_t next[MAX_LOOP_VARIABLES];
    uint32_t poisons[MAX_LOOP_VARIABLES];
    Origin origins[MAX_LOOP_VARIABLES];
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
    return Py_BuildValue("(sssIKK)", "poison", REASONS[origin->reason], program_operations[origin->code], (unsigned)origin->width,
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
        if (v[shape->grid[i]] < 1 || v[shape->grid[i]] > MAX_GRID[i])
            return Py_BuildValue("(sN)", "grid", three(state, shape->grid));
    poison = first_poison(state, shape->block, 3);
    if (poison) return poison_said(state, poison);
    for (int i = 0; i < 3; i++) {
        threads *= v[shape->block[i]]; /* at most 1024 * 2^32 */
        if (threads < 1 || threads > MAX_BLOCK_THREADS) return Py_BuildValue("(sN)", "block", three(state, shape->block));
    }
    poison = state->poison[shape->shared_bytes];
    if (poison) return poison_said(state, poison);
    if (v[shape->shared_bytes] > MAX_SHARED_BYTES)
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

/* (grid, parameters, (block, shared bytes, attributes, the addend of each slot)) */
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
    return Py_BuildValue("(NN(NKNN))", grid, parameters, block, (unsigned long long)state->value[shape->shared_bytes],
                         attributes, addends);
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
    Origin few[FEW];
    uint64_t few_values[FEW];
    uint32_t few_poisons[FEW];
    State state = {few_values, few_poisons, few};
    void *allocated = NULL;
    PyObject *result = NULL;
    if (!PyTuple_Check(inputs) || PyTuple_Size(inputs) != self->inputs) {
        PyErr_SetString(PyExc_TypeError, "evaluate((inputs...)), as many as there are");
        return NULL;
    }
    if (values > FEW) {
        allocated = malloc(values * (sizeof *state.origin + sizeof *state.value + sizeof *state.poison));
        if (allocated == NULL) return PyErr_NoMemory();
        state.origin = allocated;
        state.value = (uint64_t *)(state.origin + values);
        state.poison = (uint32_t *)(state.value + values);
    }
    memset(state.value, 0, values * sizeof *state.value);
    memset(state.poison, 0, values * sizeof *state.poison);
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
    free(allocated);
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

static PyObject *program_steps(PyObject *object, PyObject *unused) {
    (void)unused;
    return PyLong_FromUnsignedLong(((const Program *)object)->steps);
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
    {"steps", program_steps, METH_NOARGS, "steps()"},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot program_slots[] = {{Py_tp_dealloc, program_dealloc}, {Py_tp_methods, program_methods}, {0, NULL}};

static PyType_Spec program_spec = {"runtime.native._native.Program", sizeof(Program), 0, Py_TPFLAGS_DEFAULT, program_slots};

int add_program(PyObject *module) {
    program_type = (PyTypeObject *)PyType_FromSpec(&program_spec);
    if (program_type == NULL) return -1;
    Py_INCREF(program_type); /* the global's own */
    return PyModule_AddObject(module, "Program", (PyObject *)program_type);
}
