// Calls in C++: from Python's tensors to a launch by plan.h; and what operator.py does around it. What is not plainly
// right is left to Python. An extension of Python that reads tensors through DLPack's C structures, and needs nothing
// else of torch's C++; the driver's function is handed over. common/runtime/fast_path.py builds it.
//
// What it uses while Python may run it owns: Python, or another thread, may drop it meanwhile. It needs the GIL, which a
// Python without one turns on when it loads this.
#include "objects.h"

#include <cmath>
#include <string>
#include <utility>

namespace {
// Of torch, and of fast_path.py.
PyObject *forward_ad;  // what torch.autograd.forward_ad holds, by name
PyObject *new_o, *empty_like, *float32;
long long long_from;  // keys: as the ladder has it
PyObject *dtype_name, *device_name, *plan_name, *stream_name, *current_device_name, *capturing_name;
PyObject *level_name, *enabled_name, *wanted_name;  // of derivatives
PyObject *same_bits_name, *only_warned_name;         // of what torch.use_deterministic_algorithms sets
PyObject *new_empty_name, *with_dtype;               // and the names of its arguments

// A workspace. What is captured, or new to the stream, is lent by Python.
PyObject *lent(const Call &call, const WorkspacePlan &workspace, PyObject *stream, bool is_captured) {
    if (workspace.of_stream != Py_None && !is_captured) {
        PyObject *kept = held(workspace.of_stream, stream);
        if (kept || PyErr_Occurred()) return kept;
    }
    const Owned lend(Py_NewRef(workspace.lend)), sizes(PyTuple_New(call.plan.num_sizes));
    for (int i = 0; sizes && i < call.plan.num_sizes; ++i)
        PyTuple_SET_ITEM(sizes.get(), i, PyLong_FromLongLong(call.sizes[i]));
    return sizes && !PyErr_Occurred() ? PyObject_CallFunctionObjArgs(lend.get(), stream, sizes.get(), nullptr) : nullptr;
}

// Whether it launched, on torch's current stream; else with a Python error, perhaps. The device is current.
bool is_launched(Call &call) {
    const Plan &plan = call.plan;
    if (!call.is_taken()) return false;
    const Owned index(PyLong_FromLong(plan.device_index));
    const Owned stream(index ? asked(stream_name, index.get()) : nullptr);
    void *stream_at;
    if (!stream || !is_memory(stream.get(), stream_at)) return false;
    Owned memory[max_workspaces];  // the allocator waits until the stream is done
    void *workspaces[max_workspaces];
    const Owned capturing(plan.num_workspaces ? asked(capturing_name) : Py_NewRef(Py_False));
    if (!capturing) return false;
    for (int i = 0; i < plan.num_workspaces; ++i) {
        memory[i].reset(lent(call, plan.workspaces[i], stream.get(), capturing.get() != Py_False));
        if (!memory[i] || !is_memory(memory[i].get(), workspaces[i])) return false;
    }
    return launch(call, workspaces, stream_at) == 0;
}

// Whether a function has its arguments, and has been told what it needs; else with an error.
bool is_asked_right(const char *name, Py_ssize_t count, Py_ssize_t wanted) {
    if (exchange && count == wanted) return true;
    PyErr_Format(PyExc_TypeError, exchange ? "%s takes %zd arguments, not %zd" : "%s waits for set_up", name, wanted, count);
    return false;
}

// Of tensors, None for one left out; false, perhaps with an error, for what is none.
bool are_viewed(PyObject *tensors, View *views) {
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(tensors); ++i) {
        PyObject *tensor = PyTuple_GET_ITEM(tensors, i);
        if (tensor != Py_None && !is_viewed(tensor, views[i])) return false;
    }
    return true;
}

// launch(plan, tensors, softmax_scale) -> whether it launched; tensors in the operation's order, None for one left out
PyObject *py_launch(PyObject *, PyObject *const *given, Py_ssize_t count) {
    if (!is_asked_right("launch", count, 3)) return nullptr;
    const Plan *plan = plan_of(given[0]);
    double scale;
    if (!plan || !PyTuple_Check(given[1]) || !is_number(given[2], scale))
        return PyErr_Format(PyExc_TypeError, "launch takes a plan, a tuple of tensors and a scale");
    Call call{*plan, scale};
    if (PyTuple_GET_SIZE(given[1]) != plan->num_tensors) return Py_NewRef(Py_False);
    return are_viewed(given[1], call.views) && is_launched(call) ? Py_NewRef(Py_True) : left(Py_False);
}

// What says of a call which kernel it has; that of the last one, as calls that come often are alike.
struct Signature {
    PyObject *ready, *version, *is_gqa, *causal, *lse, *is_long, *same_bits;
    DLDataType dtype;
    DLDevice device;
    int64_t num_heads, head_dim;

    bool operator==(const Signature &other) const {
        return ready == other.ready && version == other.version && is_gqa == other.is_gqa && causal == other.causal && lse == other.lse &&
               is_long == other.is_long && same_bits == other.same_bits && dtype.code == other.dtype.code && dtype.bits == other.dtype.bits &&
               dtype.lanes == other.dtype.lanes && device.device_type == other.device.device_type &&
               device.device_id == other.device.device_id &&
               num_heads == other.num_heads && head_dim == other.head_dim;
    }
};
Signature last;  // which keeps its objects
PyObject *plan_of_last;

PyObject *look_up(const Signature &signature, PyObject *q) {
    const Owned dtype(PyObject_GetAttr(q, dtype_name)), device(PyObject_GetAttr(q, device_name));
    const Owned num_heads(PyLong_FromLongLong(signature.num_heads)), head_dim(PyLong_FromLongLong(signature.head_dim));
    if (!dtype || !device || !num_heads || !head_dim) return nullptr;
    const Owned key(PyTuple_Pack(10, signature.version, dtype.get(), device.get(), num_heads.get(), signature.is_gqa,
                                 head_dim.get(), signature.causal, signature.lse, signature.is_long, signature.same_bits));
    const Owned found(key ? held(signature.ready, key.get()) : nullptr);
    return found ? PyObject_GetAttr(found.get(), plan_name) : nullptr;
}

// The plan that stands ready for a call, as operator.py has it, to be released; null, perhaps with an error, where
// nothing does. `same_bits`: whether gradients are to be the same in each run; None where nobody wants one.
PyObject *find(PyObject *ready, PyObject *q, const View &view, const View &of_k, PyObject *causal, PyObject *version,
               PyObject *lse, PyObject *same_bits) {
    if (view.ndim != 4 || of_k.ndim != 4) return nullptr;
    PyObject *is_long = of_k.shape[1] >= long_from ? Py_True : Py_False;
    PyObject *is_gqa = view.shape[2] != of_k.shape[2] ? Py_True : Py_False;
    const Signature signature{ready, version, is_gqa, causal, lse, is_long, same_bits, view.dtype, view.device, view.shape[2], view.shape[3]};
    if (plan_of_last && signature == last) return Py_NewRef(plan_of_last);
    PyObject *plan = look_up(signature, q);
    if (!plan) return nullptr;
    for (PyObject *kept : {ready, version, plan}) Py_INCREF(kept);  // the others are True, False or None
    const Signature before = std::exchange(last, signature);
    PyObject *const plan_before = std::exchange(plan_of_last, plan);
    for (PyObject *kept : {before.ready, before.version, plan_before}) Py_XDECREF(kept);
    return plan;
}

bool is_current(const Plan &plan) {
    const Owned current(asked(current_device_name));
    long long index;
    return current && is_whole(current.get(), index) && index == plan.device_index;
}

// Whether one of the functions says so, or torch computes derivatives with what is computed; or with an error.
bool is_anyone(PyObject *onlookers) {
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(onlookers); ++i) {
        const Owned answer(PyObject_CallNoArgs(PyTuple_GET_ITEM(onlookers, i)));
        if (!answer || PyObject_IsTrue(answer.get())) return true;
    }
    const Owned level(held(forward_ad, level_name));
    long long number;
    return !level || !is_whole(level.get(), number) || number >= 0;
}

// Tensors that need no second look: exactly torch's, as subclasses may want to see an operator, and nobody wants gradients.
struct Plain {
    const Owned has_gradients{asked(enabled_name)};

    // False, perhaps with an error, for others. One that wants a gradient is plain too where there is a place to note that.
    bool operator()(PyObject *tensor, View &view, bool *wants = nullptr) const {
        if (!has_gradients || Py_TYPE(tensor) != tensor_type || !is_viewed(tensor, view)) return false;
        if (has_gradients.get() == Py_False) return true;
        const Owned wanted(PyObject_GetAttr(tensor, wanted_name));
        if (wants && wanted.get() == Py_True) return *wants = true;
        return wanted.get() == Py_False;
    }
};

// Whether the gradients of a call are to be the same in each run: it says so, or torch does for all. Null with an error.
PyObject *same_bits_of(PyObject *deterministic) {
    if (deterministic == Py_True) return Py_True;
    const Owned of_all(asked(same_bits_name)), only_warned(asked(only_warned_name));
    if (!of_all || !only_warned) return nullptr;
    return of_all.get() == Py_True && only_warned.get() != Py_True ? Py_True : Py_False;
}

// As common/runtime/outputs.py, without a function of Python's; null with an error where torch refuses.
PyObject *new_lse(PyObject *q, PyObject *shape) {
    PyObject *const given[] = {q, shape, float32};
    return shape ? PyObject_VectorcallMethod(new_empty_name, given, 2, with_dtype) : nullptr;
}
PyObject *new_lse(PyObject *q, const View &view) {
    return new_lse(q, Owned(Py_BuildValue("(LLL)", view.shape[0], view.shape[2], view.shape[1])).get());
}

// O, or O and the log-sum-exp; null, perhaps with an error, where it is left to Python. They come last in a plan: O is like
// Q unless it is given, and the log-sum-exp is None where nobody asks for it.
PyObject *outputs(Call &call, int num_inputs, PyObject *q, Owned o, Owned lse) {
    if (!num_inputs || call.plan.num_tensors != num_inputs + 2) return nullptr;
    if (!o) o.reset(PyObject_CallOneArg(call.views[0].is_like_new() ? empty_like : new_o, q));
    const bool is_alone = lse.get() == Py_None;
    if (!o || !lse || !is_viewed(o.get(), call.views[num_inputs]) ||
        (!is_alone && !is_viewed(lse.get(), call.views[num_inputs + 1])))
        return nullptr;
    if (!is_launched(call)) return nullptr;
    return is_alone ? o.release() : PyTuple_Pack(2, o.get(), lse.get());
}

// The tensors of attention's plans are q, k, v, O and the log-sum-exp. `out` is None, or is to be written. With gradients
// that somebody `wants` there is always a log-sum-exp; where `wants` is null they are left to Python.
PyObject *straight(PyObject *onlookers, PyObject *ready, PyObject *const tensors[4], PyObject *causal, PyObject *softmax_scale,
                   PyObject *version, PyObject *with_lse, PyObject *deterministic, bool *wants) {
    if (is_anyone(onlookers)) return nullptr;
    PyObject *q = tensors[0], *out = tensors[3];
    View views[4];
    const Plain is_plain;
    for (int i = 0; i < (out == Py_None ? 3 : 4); ++i)
        if (!is_plain(tensors[i], views[i], out == Py_None ? wants : nullptr)) return nullptr;
    if (!PyBool_Check(causal) || !PyBool_Check(with_lse) || !PyBool_Check(deterministic) || !PyUnicode_Check(version))
        return nullptr;
    const bool trains = wants && *wants;
    PyObject *same_bits = trains ? same_bits_of(deterministic) : Py_None;
    if (!same_bits) return nullptr;
    if (trains) with_lse = Py_True;
    const Owned kept(find(ready, q, views[0], views[1], causal, version, with_lse, same_bits));
    const Plan *plan = kept ? plan_of(kept.get()) : nullptr;
    if (!plan || !is_current(*plan)) return nullptr;

    double scale = std::pow(views[0].shape[3], -0.5);
    if (softmax_scale != Py_None && !is_number(softmax_scale, scale)) return nullptr;
    Call call{*plan, scale};
    std::copy_n(views, 3, call.views);
    return outputs(call, 3, q, Owned(out == Py_None ? nullptr : Py_NewRef(out)),
                   Owned(with_lse == Py_False ? Py_NewRef(Py_None) : new_lse(q, views[0])));
}

// straight(onlookers, ready, q, k, v, out, causal, softmax_scale, version, lse, deterministic, attach) -> O, (O, the
// log-sum-exp), or None: not done, also where an onlooker, of a tuple of functions, says so. Where a gradient is wanted,
// it gives what attach(q, k, v, (O, the log-sum-exp), causal, ..., deterministic) gives: an error of that is the call's, as
// much as hooks may raise. Without `attach`, which is None then, nothing is done there.
PyObject *py_straight(PyObject *, PyObject *const *given, Py_ssize_t count) {
    if (!is_asked_right("straight", count, 12)) return nullptr;
    if (!PyTuple_Check(given[0]) || !PyDict_Check(given[1]))
        return PyErr_Format(PyExc_TypeError, "onlookers are a tuple, and what is ready a dict");
    bool wants = false;
    Owned done(straight(given[0], given[1], given + 2, given[6], given[7], given[8], given[9], given[10],
                        given[11] == Py_None ? nullptr : &wants));
    if (!done) return left(Py_None);
    if (!wants) return done.release();
    return PyObject_CallFunctionObjArgs(given[11], given[2], given[3], given[4], done.get(), given[6], given[7], given[8],
                                        given[9], given[10], nullptr);
}

// What says the problem of a call, whose tensors are as an operation has them: which there are, of what types and shapes,
// and its options.
struct Said {
    View views[max_tensors];
    int count = 0;  // of tensors that there are
    std::string key;

    // False, perhaps with an error, for what is out of the ordinary.
    bool read(PyObject *tensors, PyObject *options) {
        if (!is_plain.has_gradients || !PyTuple_Check(tensors) || PyTuple_GET_SIZE(tensors) > max_tensors) return false;
        key.reserve(512);
        for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(tensors); ++i)
            if (!add_tensor(PyTuple_GET_ITEM(tensors, i))) return false;
        return add_option(options, max_depth);
    }
    PyObject *bytes() const { return PyBytes_FromStringAndSize(key.data(), key.size()); }

  private:
    static constexpr int max_depth = 2, max_options = 16;  // of tuples, and in one
    const Plain is_plain;

    template <class T>
    void add(const T *values, int count = 1) {
        key.append(reinterpret_cast<const char *>(values), count * sizeof(T));
    }
    bool add_tensor(PyObject *tensor) {
        key += tensor == Py_None ? '-' : 't';
        if (tensor == Py_None) return true;
        View &view = views[count++];
        if (!is_plain(tensor, view)) return false;
        add(&view.dtype), add(&view.device), add(&view.ndim), add(view.shape, view.ndim);
        return true;
    }
    // None, a truth value, a number, or a tuple of these. True is not 1, nor is 1.0.
    bool add_option(PyObject *option, int depth) {
        long long number;
        if (option == Py_None || PyBool_Check(option)) {
            key += option == Py_None ? 'N' : (option == Py_True ? 'T' : 'F');
        } else if (PyFloat_CheckExact(option)) {
            const double fraction = PyFloat_AS_DOUBLE(option);
            key += 'f', add(&fraction);
        } else if (is_whole(option, number)) {
            key += 'i', add(&number);
        } else if (PyTuple_CheckExact(option) && depth && PyTuple_GET_SIZE(option) <= max_options) {
            const Py_ssize_t size = PyTuple_GET_SIZE(option);
            key += '(', add(&size);
            for (Py_ssize_t i = 0; i < size; ++i)
                if (!add_option(PyTuple_GET_ITEM(option, i), depth - 1)) return false;
        } else {
            return false;
        }
        return true;
    }
};

// A problem's entry among plans: (its plan, scale, ...), which keeps all that it needs.
struct Entry {
    Said said;
    Owned parts;
    const Plan *plan = nullptr;
    double scale;

    // Whether there is one of at least so many parts, whose device is current; else perhaps with an error.
    bool find(PyObject *onlookers, PyObject *plans, PyObject *tensors, PyObject *options, Py_ssize_t least) {
        if (is_anyone(onlookers) || !said.read(tensors, options)) return false;
        const Owned key(said.bytes());
        parts.reset(key ? held(plans, key.get()) : nullptr);
        if (!parts || !PyTuple_CheckExact(parts.get()) || PyTuple_GET_SIZE(parts.get()) < least) return false;
        plan = plan_of(part(0));
        return plan && is_number(part(1), scale) && is_current(*plan);
    }
    PyObject *part(Py_ssize_t number) const { return PyTuple_GET_ITEM(parts.get(), number); }
    Call call() const {
        Call made{*plan, scale};
        std::copy_n(said.views, said.count, made.views);
        return made;
    }
};

// The third part of the entry is the shape of the log-sum-exp.
PyObject *remembered(PyObject *onlookers, PyObject *plans, PyObject *tensors, PyObject *options, PyObject *with_lse) {
    Entry entry;
    if (!PyBool_Check(with_lse) || !entry.find(onlookers, plans, tensors, options, 3)) return nullptr;
    Call call = entry.call();
    PyObject *const q = PyTuple_GET_ITEM(tensors, 0);
    return outputs(call, entry.said.count, q, nullptr,
                   Owned(with_lse == Py_False ? Py_NewRef(Py_None) : new_lse(q, entry.part(2))));
}

// remembered(onlookers, plans, tensors, options, lse) -> as straight; plans by what `said` gives for tensors, None for those
// left out, and options. Q is the first of the tensors.
PyObject *py_remembered(PyObject *, PyObject *const *given, Py_ssize_t count) {
    if (!is_asked_right("remembered", count, 5)) return nullptr;
    if (!PyTuple_Check(given[0]) || !PyDict_Check(given[1]))
        return PyErr_Format(PyExc_TypeError, "onlookers are a tuple, and plans a dict");
    PyObject *done = remembered(given[0], given[1], given[2], given[3], given[4]);
    return done ? done : left(Py_None);
}

// launched(onlookers, plans, tensors, options, outputs) -> whether it launched by a plan found likewise; outputs follow the
// tensors in the plan, None for one that is left out
PyObject *py_launched(PyObject *, PyObject *const *given, Py_ssize_t count) {
    if (!is_asked_right("launched", count, 5)) return nullptr;
    if (!PyTuple_Check(given[0]) || !PyDict_Check(given[1]) || !PyTuple_Check(given[4]))
        return PyErr_Format(PyExc_TypeError, "onlookers and outputs are tuples, and plans a dict");
    Entry entry;
    if (!entry.find(given[0], given[1], given[2], given[3], 2)) return left(Py_False);
    Call call = entry.call();
    if (entry.said.count + PyTuple_GET_SIZE(given[4]) != call.plan.num_tensors) return Py_NewRef(Py_False);
    return are_viewed(given[4], call.views + entry.said.count) && is_launched(call) ? Py_NewRef(Py_True) : left(Py_False);
}

// said(tensors, options) -> bytes; None for what is out of the ordinary
PyObject *py_said(PyObject *, PyObject *const *given, Py_ssize_t count) {
    if (!is_asked_right("said", count, 2)) return nullptr;
    Said said;
    return said.read(given[0], given[1]) ? said.bytes() : left(Py_None);
}

// set_up(torch.Tensor's exchange, torch.Tensor, plan.Plan, torch._C, what forward_ad holds, torch.empty_like, new_o, torch.float32,
// long_from): what it needs of torch and of fast_path.py
PyObject *set_up(PyObject *, PyObject *given) {
    PyObject *capsule, *tensor, *plan, *module, *of_forward_ad, *of_outputs[3];
    long long keys;
    if (!PyArg_ParseTuple(given, "OO!O!O!O!OOOL", &capsule, &PyType_Type, &tensor, &PyType_Type, &plan, &PyModule_Type,
                          &module, &PyDict_Type, &of_forward_ad, of_outputs, of_outputs + 1, of_outputs + 2, &keys))
        return nullptr;
    const auto *api = static_cast<const DLPackExchangeAPI *>(PyCapsule_GetPointer(capsule, "dlpack_exchange_api"));
    if (!api) return nullptr;
    if (api->header.version.major != DLPACK_MAJOR_VERSION || !api->dltensor_from_py_object_no_sync)
        return PyErr_Format(PyExc_ImportError, "torch's exchange by DLPack is of version %u, not %d",
                            api->header.version.major, DLPACK_MAJOR_VERSION);
    Py_INCREF(given);  // which keeps all of them, for good: calls may be under way
    tensor_type = reinterpret_cast<PyTypeObject *>(tensor), plan_type = reinterpret_cast<PyTypeObject *>(plan);
    torch_c = PyModule_GetDict(module), forward_ad = of_forward_ad;
    empty_like = of_outputs[0], new_o = of_outputs[1], float32 = of_outputs[2];
    long_from = keys, exchange = api;
    Py_RETURN_NONE;
}

// Whether all names are there; else with an error.
bool has_names() {
    for (const auto &[name, text] : {std::pair(&dtype_name, "dtype"), {&device_name, "device"}, {&plan_name, "plan"}, {&stream_name, "_cuda_getCurrentRawStream"}, {&current_device_name, "_cuda_getDevice"}, {&capturing_name, "_cuda_isCurrentStreamCapturing"}, {&level_name, "_current_level"}, {&enabled_name, "is_grad_enabled"}, {&wanted_name, "requires_grad"}, {&same_bits_name, "_get_deterministic_algorithms"}, {&only_warned_name, "_get_deterministic_algorithms_warn_only"}, {&new_empty_name, "new_empty"}})
        if (!(*name = PyUnicode_InternFromString(text))) return false;
    return (with_dtype = PyTuple_Pack(1, dtype_name));
}

PyMethodDef methods[] = {{"launch", reinterpret_cast<PyCFunction>(py_launch), METH_FASTCALL, nullptr},
                         {"straight", reinterpret_cast<PyCFunction>(py_straight), METH_FASTCALL, nullptr},
                         {"remembered", reinterpret_cast<PyCFunction>(py_remembered), METH_FASTCALL, nullptr},
                         {"launched", reinterpret_cast<PyCFunction>(py_launched), METH_FASTCALL, nullptr},
                         {"said", reinterpret_cast<PyCFunction>(py_said), METH_FASTCALL, nullptr},
                         {"set_up", set_up, METH_VARARGS, nullptr},
                         {}};
PyModuleDef module = {PyModuleDef_HEAD_INIT, "fast_path", nullptr, -1, methods};
}  // namespace

PyMODINIT_FUNC PyInit_fast_path() { return has_names() ? PyModule_Create(&module) : nullptr; }
