/* Sums of regression trees: see aot/search/boosted.py. Trees that lead nowhere are a ValueError. */

#include "native.h"

enum { MOST_FEATURES = 64, MOST_NODES = 1 << 20 };

/* What is at most `most` goes to the low side. A side is a later node, or, below 0, what leaf -1 - side adds. */
typedef struct { double most; int32_t place, side[2]; } Node;

typedef struct {
    PyObject_HEAD
    uint32_t features, nodes, leaves, roots;
    Node *node;
    double *leaf;
    int32_t *root;
} Trees;

static void trees_dealloc(PyObject *self) {
    Trees *trees = (Trees *)self;
    PyTypeObject *type = Py_TYPE(self);
    free(trees->node);
    free(trees->leaf);
    free(trees->root);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(self);
    Py_DECREF(type);
}

/* Whether a side is a leaf, or a node from `first` on. */
static int is_side(const Trees *self, int side, uint32_t first) {
    return side < 0 ? -1 - (int64_t)side < (int64_t)self->leaves : (uint32_t)side >= first && (uint32_t)side < self->nodes;
}

static int fill(Trees *self, PyObject *nodes, PyObject *leaves, PyObject *roots) {
    for (uint32_t i = 0; i < self->leaves; i++) {
        PyObject *given = PyList_GetItem(leaves, i);
        if (given == NULL) return -1;
        self->leaf[i] = PyFloat_AsDouble(given);
        if (PyErr_Occurred()) return -1;
    }
    for (uint32_t i = 0; i < self->nodes; i++) {
        Node *node = &self->node[i];
        PyObject *given = PyList_GetItem(nodes, i); /* NULL where reading one before has changed the list */
        int place, low, high, found;
        if (given == NULL) return -1;
        if (!PyTuple_Check(given)) {
            PyErr_SetString(PyExc_ValueError, "a node is a tuple");
            return -1;
        }
        Py_INCREF(given);
        found = PyArg_ParseTuple(given, "idii", &place, &node->most, &low, &high);
        Py_DECREF(given);
        if (!found) return -1;
        if (place < 0 || (uint32_t)place >= self->features || !is_side(self, low, i + 1) || !is_side(self, high, i + 1)) {
            PyErr_Format(PyExc_ValueError, "node %u asks for no feature, or has a side that is no leaf or later node", i);
            return -1;
        }
        node->place = place;
        node->side[0] = low;
        node->side[1] = high;
    }
    for (uint32_t i = 0; i < self->roots; i++) {
        PyObject *given = PyList_GetItem(roots, i);
        long root = given == NULL ? -1 : PyLong_AsLong(given);
        if (PyErr_Occurred()) return -1;
        if (root < INT32_MIN || root > INT32_MAX || !is_side(self, (int)root, 0)) {
            PyErr_Format(PyExc_ValueError, "root %ld is no node or leaf", root);
            return -1;
        }
        self->root[i] = (int32_t)root;
    }
    return 0;
}

/* Trees(features, nodes, leaves, roots) */
static PyObject *trees_new(PyTypeObject *type, PyObject *args, PyObject *keywords) {
    int features;
    PyObject *nodes, *leaves, *roots;
    Trees *self;
    (void)keywords;
    if (!PyArg_ParseTuple(args, "iO!O!O!", &features, &PyList_Type, &nodes, &PyList_Type, &leaves, &PyList_Type, &roots))
        return NULL;
    if (features < 0 || features > MOST_FEATURES || PyList_Size(nodes) > MOST_NODES || PyList_Size(leaves) > MOST_NODES ||
        PyList_Size(roots) > MOST_NODES) {
        PyErr_SetString(PyExc_ValueError, "the trees are too large");
        return NULL;
    }
    self = (Trees *)((allocfunc)PyType_GetSlot(type, Py_tp_alloc))(type, 0);
    if (self == NULL) return NULL;
    self->features = (uint32_t)features;
    self->nodes = (uint32_t)PyList_Size(nodes);
    self->leaves = (uint32_t)PyList_Size(leaves);
    self->roots = (uint32_t)PyList_Size(roots);
    self->node = calloc((size_t)self->nodes + 1, sizeof(Node));
    self->leaf = calloc((size_t)self->leaves + 1, sizeof(double));
    self->root = calloc((size_t)self->roots + 1, sizeof(int32_t));
    if (self->node == NULL || self->leaf == NULL || self->root == NULL) {
        Py_DECREF(self);
        return PyErr_NoMemory();
    }
    if (fill(self, nodes, leaves, roots) < 0) Py_CLEAR(self);
    return (PyObject *)self;
}

static PyObject *trees_added(PyObject *object, PyObject *values) {
    const Trees *self = (const Trees *)object;
    double feature[MOST_FEATURES], sum = 0.0;
    if (!PySequence_Check(values) || PySequence_Size(values) != (Py_ssize_t)self->features) {
        PyErr_SetString(PyExc_ValueError, "trees take a value for each feature");
        return NULL;
    }
    for (uint32_t i = 0; i < self->features; i++) {
        PyObject *value = PySequence_GetItem(values, i);
        feature[i] = value == NULL ? -1.0 : PyFloat_AsDouble(value);
        Py_XDECREF(value);
        if (feature[i] == -1.0 && PyErr_Occurred()) return NULL;
    }
    for (uint32_t i = 0; i < self->roots; i++) {
        int32_t at = self->root[i];
        while (at >= 0) at = self->node[at].side[!(feature[self->node[at].place] <= self->node[at].most)];
        sum += self->leaf[-1 - at];
    }
    return PyFloat_FromDouble(sum);
}

static PyMethodDef methods[] = {
    {"added", trees_added, METH_O, "added(values): the sum of what all trees say of a value for each feature"},
    {NULL, NULL, 0, NULL},
};
static PyType_Slot slots[] = {
    {Py_tp_new, (void *)trees_new},
    {Py_tp_dealloc, (void *)trees_dealloc},
    {Py_tp_methods, methods},
    {0, NULL},
};
static PyType_Spec spec = {"runtime.native._native.Trees", sizeof(Trees), 0, Py_TPFLAGS_DEFAULT, slots};

int add_trees(PyObject *module) {
    PyObject *type = PyType_FromSpec(&spec);
    return type == NULL ? -1 : PyModule_AddObject(module, "Trees", type);
}
