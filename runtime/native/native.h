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

/* Add the type of _program.c to the module; -1 with an exception set if that fails. */
int add_program(PyObject *module);

/* Add the type of _costs.c to the module; -1 with an exception set if that fails. */
int add_costs(PyObject *module);

#endif
