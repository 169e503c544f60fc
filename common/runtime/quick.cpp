// A call of common/runtime/calls.py in C++, for rungs of one kernel with the usual grid: from tensors to a launch; and what
// op.py does around it. What is not plainly right is left to Python. An extension of Python that reads tensors through
// DLPack's C structures, and needs nothing else of torch's C++; the driver's functions are handed over.
// common/runtime/quick.py builds it, and mirrors Plan.
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <ATen/dlpack.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>
#include <utility>

namespace {
constexpr int64_t left_to_python = -1;  // else the driver's status
constexpr int64_t max_grid_yz = 65535, alignment = 16, element_bytes = 2, longest = 1 << 30;

// Of the CUDA driver API: cuLaunchKernel.
using LaunchKernel = int (*)(void *function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned cta_x,
                             unsigned cta_y, unsigned cta_z, unsigned shared_bytes, void *stream, void **arguments,
                             void **extra);

struct MapPlan {
    int tensor;      // q, k, v or o
    char made[128];  // but for what differs from tensor to tensor: its address, sizes and strides
};

// What does not depend on the tensors.
struct Plan {
    LaunchKernel launch_kernel;
    void *function;
    double min_scale, max_scale;
    int64_t row_stride, max_row_stride;  // elements; a row_stride of 0: any
    PyObject *counter, *counters;  // what lends it, and a stream's own by its number; or None: see calls.py
    int device_type, device, device_index;  // as DLPack has it, and as torch: -1 for a CPU
    int gqa, multiple_q, multiple_k;
    int block_m, num_threads, shared_bytes, most_ctas;  // of a persistent grid; 0: a CTA for each tile
    int address_at, strides_at, dims_at;  // in a map, where tensor_map.py says
    int num_maps;
    MapPlan maps[4];
};

// AttentionParams of common/cuda/params.cuh.
struct Params {
    void *tensors[4];
    void *lse;
    int64_t strides[4][3];  // of batch, rows and heads
    int batch, num_heads, num_heads_k, seqlen_q, seqlen_k;
    float softmax_scale;
};

struct alignas(64) TensorMap {
    char bytes[128];
};

struct Released {
    void operator()(PyObject *object) const { Py_DECREF(object); }
};
using Owned = std::unique_ptr<PyObject, Released>;

// Of torch, and of quick.py: set once.
const DLPackExchangeAPI *exchange;
PyTypeObject *tensor_type;
PyObject *torch_c, *new_o, *new_lse;  // torch_c: what torch._C holds, by name
long long long_from;                  // keys: as tuned.py has it
PyObject *dtype_name, *device_name, *plan_name, *stream_name, *current_device_name, *capturing_name;

// A tensor as DLPack tells of it. Its memory is the tensor's, as long as that lives.
struct View : DLTensor {
    void *begin() const { return static_cast<char *>(data) + byte_offset; }
    bool is_like(const View &other) const { return ndim == 4 && std::equal(shape, shape + 4, other.shape); }
    bool goes_with(const View &other) const {
        return dtype.code == other.dtype.code && dtype.bits == other.dtype.bits &&
               device.device_type == other.device.device_type && device.device_id == other.device.device_id;
    }
    // Rows are contiguous, and begin where copies of 16 bytes may.
    bool has_rows(const Plan &plan) const {
        const int64_t steps = strides[0] | strides[1] | strides[2];
        return strides[3] == 1 && steps * element_bytes % alignment == 0 &&
               reinterpret_cast<uintptr_t>(begin()) % alignment == 0 && strides[1] <= plan.max_row_stride &&
               (plan.row_stride == 0 || strides[1] == plan.row_stride);
    }
    // As common/runtime/overlap.py: a stride is always longer than what the shorter ones span.
    bool is_apart_in_itself() const {
        int order[] = {0, 1, 2, 3};
        std::sort(order, order + 4, [&](int a, int b) { return strides[a] < strides[b]; });
        int64_t reach = 0;
        for (int i : order) {
            if (shape[i] > 1 && strides[i] <= reach) return false;
            reach += (shape[i] - 1) * strides[i];
        }
        return true;
    }
    bool is_apart_from(const View &other) const { return end() <= other.begin() || other.end() <= begin(); }

   private:
    const void *end() const {
        int64_t span = 1;
        for (int i = 0; i < 4; ++i) span += (shape[i] - 1) * strides[i];
        return static_cast<char *>(begin()) + element_bytes * span;
    }
};

bool takes(const Plan &plan, const View (&views)[4], double softmax_scale) {
    const auto &[q, k, v, o] = views;
    if (q.ndim != 4 || k.ndim != 4 || !o.is_like(q) || !v.is_like(k)) return false;
    const int64_t *sizes = q.shape, *of_k = k.shape;
    const bool has_all = *std::min_element(sizes, sizes + 4) > 0 && *std::min_element(of_k, of_k + 4) > 0;
    return has_all && std::max(sizes[1], of_k[1]) <= longest && sizes[0] <= longest && sizes[2] <= longest &&
           sizes[0] == of_k[0] && sizes[3] == of_k[3] && k.goes_with(q) && v.goes_with(q) && o.goes_with(q) &&
           q.device.device_type == plan.device_type && q.device.device_id == plan.device &&
           (sizes[2] == of_k[2] || (plan.gqa && sizes[2] % of_k[2] == 0)) &&
           sizes[1] % plan.multiple_q == 0 && of_k[1] % plan.multiple_k == 0 &&
           std::all_of(views, views + 4, [&](const View &view) { return view.has_rows(plan); }) &&
           o.is_apart_in_itself() &&
           std::all_of(views, views + 3, [&](const View &view) { return o.is_apart_from(view); }) &&
           plan.min_scale <= softmax_scale && softmax_scale <= plan.max_scale;
}

// As common/runtime/launch.py: where there is one row, head or sequence only, torch's stride means nothing. False for a
// stride whose highest bits would lie elsewhere in the map.
bool is_mapped(const Plan &plan, const MapPlan &map, const View &view, TensorMap &made) {
    const auto put = [&](int at, auto value) { std::memcpy(made.bytes + at, &value, sizeof value); };
    const int dimensions[] = {1, 2, 0};  // of the tensor, in the map's order; head_dim is the first
    std::copy_n(map.made, sizeof made.bytes, made.bytes);
    put(plan.address_at, reinterpret_cast<uint64_t>(view.begin()));
    for (int number = 0; number < 3; ++number) {
        const int i = dimensions[number];
        const int64_t size = view.shape[i], bytes = size > 1 ? element_bytes * view.strides[i] : alignment;
        if (bytes / alignment > UINT32_MAX) return false;
        put(plan.strides_at + 4 * number, uint32_t(bytes / alignment));
        put(plan.dims_at + 4 * (number + 1), uint32_t(size - 1));
    }
    return true;
}

int64_t launch(const Plan &plan, const View (&views)[4], void *lse, void *counter, void *stream, double softmax_scale) {
    if (!takes(plan, views, softmax_scale)) return left_to_python;
    const int64_t *sizes = views[0].shape, *of_k = views[1].shape;
    int64_t x = (sizes[1] + plan.block_m - 1) / plan.block_m, y = sizes[2], z = sizes[0];
    if (plan.most_ctas) {
        if (x * y > longest || x * y * z > longest) return left_to_python;
        x = std::min<int64_t>(x * y * z, plan.most_ctas), y = z = 1;
    }
    if (y > max_grid_yz || z > max_grid_yz) return left_to_python;

    Params params{{}, lse, {}, int(sizes[0]), int(sizes[2]), int(of_k[2]), int(sizes[1]), int(of_k[1]),
                  float(softmax_scale)};
    for (int i = 0; i < 4; ++i) {
        params.tensors[i] = views[i].begin();
        std::copy_n(views[i].strides, 3, params.strides[i]);
    }
    TensorMap maps[4];
    for (int i = 0; i < plan.num_maps; ++i)
        if (!is_mapped(plan, plan.maps[i], views[plan.maps[i].tensor], maps[i])) return left_to_python;

    void *arguments[3];
    int count = 0;
    arguments[count++] = &params;
    if (counter) arguments[count++] = &counter;
    if (plan.num_maps) arguments[count++] = maps;
    int status;
    Py_BEGIN_ALLOW_THREADS;  // it waits where the GPU's queue is full
    status = plan.launch_kernel(plan.function, x, y, z, plan.num_threads, 1, 1, plan.shared_bytes, stream, arguments,
                                nullptr);
    Py_END_ALLOW_THREADS;
    return status;
}

bool is_viewed(PyObject *tensor, View &view) {
    return PyObject_TypeCheck(tensor, tensor_type) && exchange->dltensor_from_py_object_no_sync(tensor, &view) == 0;
}

// An address, a tensor's, or null for None.
void *address(PyObject *memory) {
    if (memory == Py_None) return nullptr;
    if (PyLong_Check(memory)) return PyLong_AsVoidPtr(memory);
    View view;
    return is_viewed(memory, view) ? view.begin() : nullptr;
}

// What a function of torch._C returns, without an argument or with one; null, perhaps with an error.
PyObject *asked(PyObject *name, PyObject *argument = nullptr) {
    PyObject *function = PyDict_GetItemWithError(torch_c, name);
    if (!function) return nullptr;
    return argument ? PyObject_CallOneArg(function, argument) : PyObject_CallNoArgs(function);
}

// Python looks at what is left to it, and comes upon an error again, unless it is an interrupt.
PyObject *left(PyObject *answer) {
    if (PyErr_Occurred() && !PyErr_ExceptionMatches(PyExc_Exception)) return nullptr;
    PyErr_Clear();
    return Py_NewRef(answer);
}

// What counts tiles on a stream. What is captured, or new to the stream, is lent by Python.
PyObject *counter(const Plan &plan, PyObject *q, PyObject *stream) {
    if (plan.counter == Py_None) return Py_NewRef(Py_None);
    const Owned capturing(asked(capturing_name));
    PyObject *kept = capturing.get() == Py_False ? PyDict_GetItemWithError(plan.counters, stream) : nullptr;
    if (kept) return Py_NewRef(kept);
    return PyErr_Occurred() ? nullptr : PyObject_CallFunctionObjArgs(plan.counter, q, stream, nullptr);
}

// Whether it launched, on torch's current stream; else with a Python error, perhaps. The device is current.
bool is_launched(const Plan &plan, const View (&views)[4], PyObject *q, PyObject *lse, double softmax_scale) {
    const Owned index(PyLong_FromLong(plan.device_index));
    const Owned stream(index ? asked(stream_name, index.get()) : nullptr);
    if (!stream) return false;
    const Owned lent(counter(plan, q, stream.get()));
    if (!lent) return false;
    void *lse_at = address(lse), *counter_at = address(lent.get()), *stream_at = address(stream.get());
    return !PyErr_Occurred() && launch(plan, views, lse_at, counter_at, stream_at, softmax_scale) == 0;
}

// launch(plan, q, k, v, o, lse, softmax_scale) -> whether it launched
PyObject *py_launch(PyObject *, PyObject *const *given, Py_ssize_t count) {
    if (count != 7) return PyErr_Format(PyExc_TypeError, "launch takes 7 arguments, not %zd", count);
    const auto *plan = static_cast<const Plan *>(PyLong_AsVoidPtr(given[0]));
    const double scale = PyFloat_AsDouble(given[6]);
    if (PyErr_Occurred()) return nullptr;
    View views[4];
    for (int i = 0; i < 4; ++i)
        if (!is_viewed(given[1 + i], views[i])) return left(Py_False);
    return is_launched(*plan, views, given[1], given[5], scale) ? Py_NewRef(Py_True) : left(Py_False);
}

// The kind of tensors that was found last: calls that come often are of one. What stands ready stays so.
struct Kind {
    PyObject *ready, *version, *causal, *lse, *is_long;
    DLDataType dtype;
    DLDevice device;
    int64_t num_heads, head_dim;

    bool operator==(const Kind &other) const {
        return ready == other.ready && version == other.version && causal == other.causal && lse == other.lse &&
               is_long == other.is_long && dtype.code == other.dtype.code && dtype.bits == other.dtype.bits &&
               dtype.lanes == other.dtype.lanes && device.device_type == other.device.device_type &&
               device.device_id == other.device.device_id &&
               num_heads == other.num_heads && head_dim == other.head_dim;
    }
};
Kind last;  // which keeps its objects
const Plan *plan_of_last;

const Plan *look_up(const Kind &kind, PyObject *q) {
    const Owned dtype(PyObject_GetAttr(q, dtype_name)), device(PyObject_GetAttr(q, device_name));
    const Owned num_heads(PyLong_FromLongLong(kind.num_heads)), head_dim(PyLong_FromLongLong(kind.head_dim));
    if (!dtype || !device || !num_heads || !head_dim) return nullptr;
    const Owned key(PyTuple_Pack(8, kind.version, dtype.get(), device.get(), num_heads.get(), head_dim.get(),
                                 kind.causal, kind.lse, kind.is_long));
    PyObject *found = key ? PyDict_GetItemWithError(kind.ready, key.get()) : nullptr;
    const Owned plan(found ? PyObject_GetAttr(found, plan_name) : nullptr);
    return plan ? static_cast<const Plan *>(PyLong_AsVoidPtr(plan.get())) : nullptr;
}

// What stands ready for tensors of a kind, as op.py has it; null, perhaps with an error, where nothing does.
const Plan *find(PyObject *ready, PyObject *q, const View &view, const View &of_k, PyObject *causal, PyObject *version,
                 PyObject *lse) {
    if (view.ndim != 4 || of_k.ndim != 4) return nullptr;
    PyObject *is_long = of_k.shape[1] >= long_from ? Py_True : Py_False;
    const Kind kind{ready, version, causal, lse, is_long, view.dtype, view.device, view.shape[2], view.shape[3]};
    if (plan_of_last && kind == last) return plan_of_last;
    const Plan *plan = look_up(kind, q);
    if (!plan) return nullptr;
    for (PyObject *held : {ready, version}) Py_INCREF(held);  // the others are True or False
    const Kind before = std::exchange(last, kind);
    plan_of_last = plan;
    for (PyObject *held : {before.ready, before.version}) Py_XDECREF(held);
    return plan;
}

bool is_current(const Plan &plan) {
    const Owned current(asked(current_device_name));
    return current && PyLong_AsLong(current.get()) == plan.device_index;
}

// Whether one of the functions says so; or with an error.
bool is_anyone(PyObject *onlookers) {
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(onlookers); ++i) {
        const Owned answer(PyObject_CallNoArgs(PyTuple_GET_ITEM(onlookers, i)));
        if (!answer || PyObject_IsTrue(answer.get())) return true;
    }
    return false;
}

// O, or O and the log-sum-exp; null, perhaps with an error, where it is left to Python. O is None, or is to be written.
PyObject *straight(PyObject *onlookers, PyObject *ready, PyObject *const tensors[4], PyObject *causal, PyObject *softmax_scale,
                   PyObject *version, PyObject *with_lse) {
    if (is_anyone(onlookers)) return nullptr;
    View views[4];
    const int num_given = tensors[3] == Py_None ? 3 : 4;
    for (int i = 0; i < num_given; ++i)  // exactly torch's: subclasses may want to see an operator
        if (Py_TYPE(tensors[i]) != tensor_type || !is_viewed(tensors[i], views[i])) return nullptr;
    const bool is_scale = softmax_scale == Py_None || PyFloat_Check(softmax_scale) || PyLong_Check(softmax_scale);
    if (!PyBool_Check(causal) || !PyBool_Check(with_lse) || !is_scale) return nullptr;
    PyObject *q = tensors[0];
    const Plan *plan = find(ready, q, views[0], views[1], causal, version, with_lse);
    if (!plan || !is_current(*plan)) return nullptr;

    const double scale = softmax_scale == Py_None ? std::pow(views[0].shape[3], -0.5) : PyFloat_AsDouble(softmax_scale);
    if (PyErr_Occurred()) return nullptr;
    Owned o(num_given == 4 ? Py_NewRef(tensors[3]) : PyObject_CallOneArg(new_o, q));
    const bool is_alone = with_lse == Py_False;
    const Owned lse(is_alone ? Py_NewRef(Py_None) : PyObject_CallOneArg(new_lse, q));
    if (!o || !lse || !is_viewed(o.get(), views[3]) || !is_launched(*plan, views, q, lse.get(), scale)) return nullptr;
    return is_alone ? o.release() : PyTuple_Pack(2, o.get(), lse.get());
}

// straight(onlookers, ready, q, k, v, out, causal, softmax_scale, version, lse) -> O, (O, the log-sum-exp), or None: not
// done, also where an onlooker, of a tuple of functions, says so
PyObject *py_straight(PyObject *, PyObject *const *given, Py_ssize_t count) {
    if (count != 10) return PyErr_Format(PyExc_TypeError, "straight takes 10 arguments, not %zd", count);
    if (!PyTuple_Check(given[0])) return PyErr_Format(PyExc_TypeError, "onlookers are a tuple");
    PyObject *done = straight(given[0], given[1], given + 2, given[6], given[7], given[8], given[9]);
    return done ? done : left(Py_None);
}

// set_up(torch.Tensor's exchange, torch.Tensor, torch._C, new_o, new_lse, long_from): what it needs of torch and of
// quick.py
PyObject *set_up(PyObject *, PyObject *given) {
    PyObject *capsule;
    if (!PyArg_ParseTuple(given, "OOOOOL", &capsule, &tensor_type, &torch_c, &new_o, &new_lse, &long_from))
        return nullptr;
    Py_INCREF(given);  // which keeps all of them
    torch_c = PyModule_GetDict(torch_c);
    dtype_name = PyUnicode_InternFromString("dtype");
    device_name = PyUnicode_InternFromString("device");
    plan_name = PyUnicode_InternFromString("plan_at");
    stream_name = PyUnicode_InternFromString("_cuda_getCurrentRawStream");
    current_device_name = PyUnicode_InternFromString("_cuda_getDevice");
    capturing_name = PyUnicode_InternFromString("_cuda_isCurrentStreamCapturing");
    exchange = static_cast<const DLPackExchangeAPI *>(PyCapsule_GetPointer(capsule, "dlpack_exchange_api"));
    if (!exchange) return nullptr;
    if (exchange->header.version.major != DLPACK_MAJOR_VERSION || !exchange->dltensor_from_py_object_no_sync)
        return PyErr_Format(PyExc_ImportError, "torch's exchange by DLPack is of version %u, not %d",
                            exchange->header.version.major, DLPACK_MAJOR_VERSION);
    Py_RETURN_NONE;
}

PyMethodDef methods[] = {{"launch", reinterpret_cast<PyCFunction>(py_launch), METH_FASTCALL, nullptr},
                         {"straight", reinterpret_cast<PyCFunction>(py_straight), METH_FASTCALL, nullptr},
                         {"set_up", set_up, METH_VARARGS, nullptr},
                         {}};
PyModuleDef module = {PyModuleDef_HEAD_INIT, "quick", nullptr, -1, methods};
}  // namespace

PyMODINIT_FUNC PyInit_quick() { return PyModule_Create(&module); }
