// What fast_path.cpp reads of Python's objects: tensors through DLPack's C structures, plans, numbers and addresses.
#pragma once
#include "owned.h"
#include "plan.h"

namespace {
// Of torch, and of plan.py; fast_path.cpp sets them.
const DLPackExchangeAPI *exchange;  // null until the others are set
PyTypeObject *tensor_type, *plan_type;
PyObject *torch_c;  // what torch._C holds, by name

bool is_viewed(PyObject *tensor, View &view) {
    DLTensor seen;
    return PyObject_TypeCheck(tensor, tensor_type) && exchange->dltensor_from_py_object_no_sync(tensor, &seen) == 0 &&
           view.read(seen);
}

// A plan of plan.py, which lives as long as its object; null, perhaps with an error, for what is none.
const Plan *plan_of(PyObject *object) {
    Py_buffer memory;
    if (!PyObject_TypeCheck(object, plan_type) || PyObject_GetBuffer(object, &memory, PyBUF_SIMPLE)) return nullptr;
    const auto *plan = memory.len == sizeof(Plan) ? static_cast<const Plan *>(memory.buf) : nullptr;
    PyBuffer_Release(&memory);
    return plan;
}

// A number of Python's own, of which True is none; false, perhaps with an error, for anything else.
bool is_number(PyObject *object, double &number) {
    if (!PyFloat_Check(object) && !PyLong_CheckExact(object)) return false;
    number = PyFloat_AsDouble(object);
    return !PyErr_Occurred();
}

// A whole number likewise.
bool is_whole(PyObject *object, long long &number) {
    if (!PyLong_CheckExact(object)) return false;
    number = PyLong_AsLongLong(object);
    return !PyErr_Occurred();
}

// An address, or a tensor's; false, perhaps with an error, for what is neither.
bool is_memory(PyObject *object, void *&address) {
    View view;
    if (PyLong_CheckExact(object)) address = PyLong_AsVoidPtr(object);
    else if (is_viewed(object, view)) address = view.begin();
    else return false;
    return !PyErr_Occurred();
}

// What a dict has, to be released; null, perhaps with an error, where it has nothing.
PyObject *held(PyObject *dict, PyObject *key) { return Py_XNewRef(PyDict_GetItemWithError(dict, key)); }

// What a function of torch._C returns, without an argument or with one; null, perhaps with an error.
PyObject *asked(PyObject *name, PyObject *argument = nullptr) {
    const Owned function(held(torch_c, name));
    if (!function) return nullptr;
    return argument ? PyObject_CallOneArg(function.get(), argument) : PyObject_CallNoArgs(function.get());
}

// Python looks at what is left to it, and comes upon an error again, unless it is an interrupt.
PyObject *left(PyObject *answer) {
    if (PyErr_Occurred() && !PyErr_ExceptionMatches(PyExc_Exception)) return nullptr;
    PyErr_Clear();
    return Py_NewRef(answer);
}
}  // namespace
