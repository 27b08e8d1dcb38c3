// The module's functions on objects of Python; a part of cpu_module.cpp, which includes it.

namespace {

// The attributes of a torch module with all that it holds.
PyObject* held_names() {
    static PyObject* const names = Py_BuildValue("(NNN)", PyUnicode_InternFromString("_parameters"),
                                                 PyUnicode_InternFromString("_buffers"),
                                                 PyUnicode_InternFromString("_modules"));
    return names;
}

// holds_same(modules, values): whether torch modules have these parameters, buffers and modules, in
// this order, the very objects; false for modules that hold them otherwise than in dicts. modules,
// values: tuples
PyObject* holds_same(PyObject*, PyObject* args) {
    PyObject *modules, *values;
    if (!PyArg_ParseTuple(args, "O!O!", &PyTuple_Type, &modules, &PyTuple_Type, &values))
        return nullptr;
    PyObject* const names = held_names();
    if (!names) return nullptr;
    const Py_ssize_t count = PyTuple_Size(values);
    Py_ssize_t found = 0;
    bool same = true;
    for (Py_ssize_t i = 0; same && i < PyTuple_Size(modules); ++i) {
        PyObject* own = PyObject_GenericGetDict(PyTuple_GetItem(modules, i), nullptr);
        if (!own) return nullptr;
        for (Py_ssize_t j = 0; j < PyTuple_Size(names); ++j) {
            PyObject* const name = PyTuple_GetItem(names, j);
            PyObject *held = PyDict_GetItemWithError(own, name), *key, *value;
            same = same && held && PyDict_Check(held);
            for (Py_ssize_t at = 0; same && PyDict_Next(held, &at, &key, &value); ++found)
                same = found < count && value == PyTuple_GetItem(values, found);
        }
        Py_DECREF(own);
        if (PyErr_Occurred()) return nullptr;
    }
    return PyBool_FromLong(same && found == count);
}

}  // namespace
