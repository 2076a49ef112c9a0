/* A launch program as program_read.c leaves it to program.c. */

#ifndef RUNTIME_PROGRAM_H
#define RUNTIME_PROGRAM_H

#include "limits.h"
#include "native.h"

enum { MOST_WORDS_OF_ATTRIBUTE = 3, MOST_ATTRIBUTES = 4, MOST_FLAGS = 4 }; /* one of each that there is */

enum Code {
    ADD, SUB, MUL, AND, OR, XOR, UDIV, SDIV, UREM, SREM, CEILDIVSI, FLOORDIVSI, SHL, LSHR, ASHR, UMIN, UMAX, SMIN, SMAX,
    EQ, NE, ULT, ULE, UGT, UGE, SLT, SLE, SGT, SGE,
    TRUNC, ZEXT, SEXT,
    CTLZ, ABS,
    CONST, SELECT, LOOP, CODES
};
extern const char *const program_operations[CODES]; /* their names */
enum { LAST_BINARY = SMAX, LAST_COMPARISON = SGE, LAST_CAST = SEXT, LAST_FLAGGED = ABS };

/* Flags of LLVM: where what they promise does not hold, the result is poison. */
enum { NSW = 1, NUW = 2, EXACT = 4, DISJOINT = 8 };

typedef struct {
    uint8_t code, width, source, flags; /* of a comparison or cast, `source` is the width of what it takes */
    uint32_t a, b, c;
    uint64_t constant; /* of a loop, which */
} Op;

typedef struct {
    uint32_t base, variables, rounds, result, test, head, head_ops, body, body_ops;
    uint32_t first[MAX_LOOP_VARIABLES], next[MAX_LOOP_VARIABLES];
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
    uint32_t inputs, ops, loops, launches;
    uint32_t scratch; /* the most values there are at a time, in a loop or not */
    uint32_t steps;   /* the most that an evaluation takes: ops, those of loops in every round, words and slots */
    uint8_t *widths; /* of the inputs */
    Op *op, *inner; /* inner: those of loops */
    Loop *loop;
    Shape launch[MAX_LAUNCHES];
} Program;

extern PyTypeObject *program_type;

/* The static method Program.read. */
PyObject *program_read(PyObject *unused, PyObject *args);

static inline uint64_t mask_of(unsigned width) { return width == 64 ? UINT64_MAX : (1ull << width) - 1; }

#endif
