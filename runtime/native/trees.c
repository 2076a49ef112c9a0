/* Sums of regression trees: see aot/search/boosted.py. Trees that lead nowhere are a ValueError. */

#include "native.h"
#include "rounding.h"

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
    if (read_floats(leaves, self->leaf, self->leaves) < 0) return -1;
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
        if (given == NULL) return -1;
        Py_INCREF(given);
        long root = PyLong_AsLong(given);
        Py_DECREF(given);
        if (PyErr_Occurred()) return -1;
        if (root < INT32_MIN || root > INT32_MAX || !is_side(self, (int)root, 0)) {
            PyErr_Format(PyExc_ValueError, "root %ld is no node or leaf", root);
            return -1;
        }
        self->root[i] = (int32_t)root;
    }
    return 0;
}

/* Trees with room for so many nodes, leaves and roots; NULL with an exception set if there is no memory. */
static Trees *allocated(PyTypeObject *type, uint32_t features, Py_ssize_t nodes, Py_ssize_t leaves, Py_ssize_t roots) {
    Trees *self = (Trees *)((allocfunc)PyType_GetSlot(type, Py_tp_alloc))(type, 0);
    if (self == NULL) return NULL;
    self->features = features;
    self->nodes = (uint32_t)nodes;
    self->leaves = (uint32_t)leaves;
    self->roots = (uint32_t)roots;
    self->node = calloc((size_t)nodes + 1, sizeof(Node));
    self->leaf = calloc((size_t)leaves + 1, sizeof(double));
    self->root = calloc((size_t)roots + 1, sizeof(int32_t));
    if (self->node == NULL || self->leaf == NULL || self->root == NULL) {
        Py_DECREF(self);
        PyErr_NoMemory();
        return NULL;
    }
    return self;
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
    self = allocated(type, (uint32_t)features, PyList_Size(nodes), PyList_Size(leaves), PyList_Size(roots));
    if (self == NULL) return NULL;
    if (fill(self, nodes, leaves, roots) < 0) Py_CLEAR(self);
    return (PyObject *)self;
}

/* Where a side leads once nodes that ask for a known feature are passed by; `passed` has that of each later node. */
static int32_t passed_by(const int32_t *passed, int32_t side) {
    return side < 0 ? side : passed[side];
}

/* The place of a side of `self` in `found`, in whose order nodes were kept. A leaf is copied for each that has it. */
static int32_t placed(const Trees *self, Trees *found, const int32_t *place, int32_t side) {
    if (side >= 0) return place[side];
    found->leaf[found->leaves] = self->leaf[-1 - side];
    return -1 - (int32_t)found->leaves++;
}

/* Those of `self` where `known` features have these values, over the others in their order; `passed` and `place` have
   room for a number for each node. */
static PyObject *restricted(const Trees *self, PyTypeObject *type, const uint8_t *known, const double *feature,
                            int32_t *passed, int32_t *place) {
    int32_t rest[MOST_FEATURES];
    uint32_t left = 0, kept = 0;
    Trees *found;
    for (uint32_t i = 0; i < self->features; i++) rest[i] = known[i] ? -1 : (int32_t)left++;
    for (uint32_t i = self->nodes; i-- > 0;) {
        const Node *node = &self->node[i];
        passed[i] = known[node->place] ? passed_by(passed, node->side[!(feature[node->place] <= node->most)]) : (int32_t)i;
        place[i] = -1;
    }
    /* Sides are later nodes, so what leads to a node has been asked before it. */
    for (uint32_t i = 0; i < self->roots; i++) {
        int32_t root = passed_by(passed, self->root[i]);
        if (root >= 0) place[root] = 0;
    }
    for (uint32_t i = 0; i < self->nodes; i++) {
        if (place[i] < 0) continue;
        place[i] = (int32_t)kept++;
        for (int j = 0; j < 2; j++) {
            int32_t side = passed_by(passed, self->node[i].side[j]);
            if (side >= 0) place[side] = 0;
        }
    }
    found = allocated(type, left, kept, 2 * (Py_ssize_t)kept + self->roots, self->roots);
    if (found == NULL) return NULL;
    found->leaves = 0;
    for (uint32_t i = 0; i < self->nodes; i++) {
        if (place[i] < 0) continue;
        Node *node = &found->node[place[i]];
        node->most = self->node[i].most;
        node->place = rest[self->node[i].place];
        for (int j = 0; j < 2; j++) node->side[j] = placed(self, found, place, passed_by(passed, self->node[i].side[j]));
    }
    for (uint32_t i = 0; i < self->roots; i++) found->root[i] = placed(self, found, place, passed_by(passed, self->root[i]));
    return (PyObject *)found;
}

static PyObject *trees_given(PyObject *object, PyObject *values) {
    const Trees *self = (const Trees *)object;
    uint8_t known[MOST_FEATURES];
    double feature[MOST_FEATURES];
    int32_t *passed;
    PyObject *found;
    if (!PySequence_Check(values) || PySequence_Size(values) != (Py_ssize_t)self->features) {
        PyErr_SetString(PyExc_ValueError, "trees take a value for each feature, or None");
        return NULL;
    }
    for (uint32_t i = 0; i < self->features; i++) {
        PyObject *value = PySequence_GetItem(values, i);
        known[i] = value != Py_None;
        feature[i] = value == NULL ? -1.0 : known[i] ? PyFloat_AsDouble(value) : 0.0;
        Py_XDECREF(value);
        if (feature[i] == -1.0 && PyErr_Occurred()) return NULL;
    }
    passed = malloc(2 * ((size_t)self->nodes + 1) * sizeof *passed);
    if (passed == NULL) return PyErr_NoMemory();
    found = restricted(self, Py_TYPE(object), known, feature, passed, passed + self->nodes + 1);
    free(passed);
    return found;
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
    {"given", trees_given, METH_O, "given(values): the trees over the features whose value is None, where the others have theirs"},
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
