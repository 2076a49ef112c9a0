/* What the parts of runtime.native._native share. Python's stable ABI of 3.10. */

#ifndef RUNTIME_NATIVE_H
#define RUNTIME_NATIVE_H

#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030A0000
#include <Python.h>
#include <structmember.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

enum { MOST_TENSORS = 12 }; /* of a call, and pointers of a launch */

/* A sequence of integers, each modulo 2^64; how many, or -1 with an exception set if they are more than `most`. */
Py_ssize_t read_integers(PyObject *sequence, uint64_t *out, Py_ssize_t most);

/* The floats of a list of so many; -1 with an exception set where it has another number of them. Reading one may run
   Python, which may change the list. */
int read_floats(PyObject *list, double *out, Py_ssize_t count);

/* Add what a part has to the module; -1 with an exception set if that fails. */
int add_counter(PyObject *module);
int add_costs(PyObject *module);
int add_effects(PyObject *module);
int add_launch(PyObject *module);
int add_pointers(PyObject *module);
int add_program(PyObject *module);
int add_table(PyObject *module); /* after those of launches and counters */
int add_trees(PyObject *module);

#endif
