// An object of Python that is given back at the end.
#pragma once
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <memory>

namespace {
struct Released {
    void operator()(PyObject *object) const { Py_DECREF(object); }
};
using Owned = std::unique_ptr<PyObject, Released>;
}  // namespace
