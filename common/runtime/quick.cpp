// Launches kernels on tensors that are plainly right, as a plan says: what of it does not depend on the tensors is found
// once, by common/runtime/quick.py, which mirrors Plan. And what op.py does around it. What else there is, is left to
// Python. An extension of Python that reads tensors through DLPack's C structures, and needs nothing else of torch's C++;
// the driver's function is handed over.
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
constexpr int max_tensors = 12, max_sizes = 8, max_kernels = 4, max_fields = 48, max_params = 512, max_maps = 4, max_workspaces = 4;

// Of the CUDA driver API: CUlaunchConfig and cuLaunchKernelEx.
struct LaunchConfig {
    unsigned grid[3], cta[3], shared_bytes;
    void *stream;
    const void *attributes;
    unsigned num_attributes;
};
using LaunchKernel = int (*)(const LaunchConfig *config, void *function, void **arguments, void **extra);

// A whole number of a plan: itself, or from -1 downwards a size.
using Number = int64_t;

struct TensorPlan {
    int dtype_code, dtype_bits, ndim, is_output;
    int may_be_left_out;
    Number shape[4];
};

// Where a kernel is told what: of a tensor its address (A) or strides (s); a size in 32 bits (i) or 64 (q); the scale (f).
struct FieldPlan {
    int kind, at, number;
};

struct MapPlan {
    int tensor;
    char made[128];  // but for what differs from tensor to tensor: its address, sizes and strides
};

struct KernelPlan {
    void *function;
    const void *attributes;
    Number grid[3];
    int64_t divisors[3];  // of the grid's numbers, rounded up
    int cluster[3], num_threads, shared_bytes, most_ctas;  // of a persistent grid; 0: a CTA for each tile
    int num_attributes, num_fields, num_maps;
    FieldPlan fields[max_fields];
    MapPlan maps[max_maps];
};

struct WorkspacePlan {
    PyObject *lend, *of_stream;  // what lends it, for a stream and sizes; and a stream's own by its number, or None
};

// What does not depend on the tensors.
struct Plan {
    LaunchKernel launch_kernel;
    double min_scale, max_scale;
    int64_t row_stride, max_row_stride;          // elements; a row_stride of 0: any
    int device_type, device, device_index;       // as DLPack has it, and as torch: -1 for a CPU
    int address_at, strides_at, dims_at;         // in a map, where tensor_map.py says
    int num_heads, num_heads_k, gqa;             // sizes; and whether they may differ
    int num_tensors, num_sizes, num_kernels, num_workspaces;
    int64_t multiples[max_sizes];                // each size is one
    TensorPlan tensors[max_tensors];
    KernelPlan kernels[max_kernels];
    WorkspacePlan workspaces[max_workspaces];
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
    bool is_there = false;

    void *begin() const { return is_there ? static_cast<char *>(data) + byte_offset : nullptr; }
    // Rows are contiguous, and begin where copies of 16 bytes may.
    bool has_rows(const Plan &plan) const {
        const int64_t steps = strides[0] | strides[1] | strides[2];
        return strides[3] == 1 && steps * element_bytes % alignment == 0 &&
               reinterpret_cast<uintptr_t>(begin()) % alignment == 0 && strides[1] <= plan.max_row_stride &&
               (plan.row_stride == 0 || strides[1] == plan.row_stride);
    }
    bool is_contiguous() const {
        int64_t step = 1;
        for (int i = ndim - 1; i >= 0; step *= shape[i--])
            if (shape[i] > 1 && strides[i] != step) return false;
        return true;
    }
    // As common/runtime/overlap.py: a stride is always longer than what the shorter ones span.
    bool is_apart_in_itself() const {
        int order[] = {0, 1, 2, 3};
        std::sort(order, order + ndim, [&](int a, int b) { return strides[a] < strides[b]; });
        int64_t reach = 0;
        for (int n = 0; n < ndim; ++n) {
            const int i = order[n];
            if (shape[i] > 1 && strides[i] <= reach) return false;
            reach += (shape[i] - 1) * strides[i];
        }
        return true;
    }
    bool is_apart_from(const View &other) const { return end() <= other.begin() || other.end() <= begin(); }

   private:
    const void *end() const {
        int64_t span = 1;
        for (int i = 0; i < ndim; ++i) span += (shape[i] - 1) * strides[i];
        return static_cast<char *>(begin()) + dtype.bits / 8 * span;
    }
};

// The tensors of a call, and the sizes that they tell.
struct Call {
    const Plan &plan;
    double softmax_scale;
    View views[max_tensors];
    int64_t sizes[max_sizes] = {};

    int64_t value(Number number) const { return number < 0 ? sizes[-1 - number] : number; }

    bool is_taken() {
        for (int i = 0; i < plan.num_tensors; ++i)
            if (!is_taken(plan.tensors[i], views[i])) return false;
        for (int i = 0; i < plan.num_sizes; ++i)
            if (sizes[i] % plan.multiples[i]) return false;
        const int64_t heads = sizes[plan.num_heads], heads_k = sizes[plan.num_heads_k];
        return (heads == heads_k || (plan.gqa && heads % heads_k == 0)) && are_apart() &&
               plan.min_scale <= softmax_scale && softmax_scale <= plan.max_scale;
    }

   private:
    bool is_taken(const TensorPlan &asked, const View &view) {
        if (!view.is_there) return asked.may_be_left_out;
        if (view.ndim != asked.ndim || view.dtype.code != asked.dtype_code || view.dtype.bits != asked.dtype_bits ||
            view.device.device_type != plan.device_type || view.device.device_id != plan.device)
            return false;
        for (int i = 0; i < view.ndim; ++i)
            if (view.shape[i] <= 0 || view.shape[i] > longest || !is(asked.shape[i], view.shape[i])) return false;
        return view.ndim == 4 ? view.has_rows(plan) : view.is_contiguous();
    }
    // Whether a number is that; the first tensor that has a size tells it.
    bool is(Number number, int64_t found) {
        if (number < 0 && !sizes[-1 - number]) sizes[-1 - number] = found;
        return value(number) == found;
    }
    // Outputs have a place of their own for each element.
    bool are_apart() const {
        for (int i = 0; i < plan.num_tensors; ++i) {
            if (!plan.tensors[i].is_output || !views[i].is_there) continue;
            if (!views[i].is_apart_in_itself()) return false;
            for (int other = 0; other < plan.num_tensors; ++other)
                if (other != i && views[other].is_there && !views[i].is_apart_from(views[other])) return false;
        }
        return true;
    }
};

// A kernel's launch, ready but for the stream.
struct Launch {
    LaunchConfig config;
    TensorMap maps[max_maps];
    alignas(16) char params[max_params];
    void *arguments[3];

    // False for what is left to Python.
    bool prepare(const Call &call, const KernelPlan &kernel, void **workspaces) {
        if (!has_grid(call, kernel)) return false;
        for (int i = 0; i < kernel.num_fields; ++i) put(call, kernel.fields[i]);
        for (int i = 0; i < kernel.num_maps; ++i)
            if (!is_mapped(call.plan, kernel.maps[i], call.views[kernel.maps[i].tensor], maps[i])) return false;
        int count = 0;
        arguments[count++] = params;
        if (call.plan.num_workspaces) arguments[count++] = workspaces;
        if (kernel.num_maps) arguments[count++] = maps;
        return true;
    }

   private:
    bool has_grid(const Call &call, const KernelPlan &kernel) {
        int64_t grid[3], tiles = 1;
        for (int i = 0; i < 3; ++i) {
            grid[i] = (call.value(kernel.grid[i]) + kernel.divisors[i] - 1) / kernel.divisors[i];
            if (grid[i] > longest / tiles) return false;
            tiles *= grid[i];
        }
        if (kernel.most_ctas) grid[0] = std::min<int64_t>(tiles, kernel.most_ctas), grid[1] = grid[2] = 1;
        for (int i = 0; i < 3; ++i)
            if (grid[i] % kernel.cluster[i] || (i && grid[i] > max_grid_yz)) return false;
        config = {{unsigned(grid[0]), unsigned(grid[1]), unsigned(grid[2])}, {unsigned(kernel.num_threads), 1, 1},
                  unsigned(kernel.shared_bytes), nullptr, kernel.attributes, unsigned(kernel.num_attributes)};
        return true;
    }
    void put(const Call &call, const FieldPlan &field) {
        const auto store = [&](auto value) { std::memcpy(params + field.at, &value, sizeof value); };
        switch (field.kind) {
        case 'A': return store(call.views[field.number].begin());
        case 's': return (void)std::memcpy(params + field.at, call.views[field.number].strides, 3 * sizeof(int64_t));
        case 'i': return store(int(call.sizes[field.number]));
        case 'q': return store(call.sizes[field.number]);
        case 'f': return store(float(call.softmax_scale));
        }
    }
    // As common/runtime/launch.py: where there is one row, head or sequence only, torch's stride means nothing. False for
    // a stride whose highest bits would lie elsewhere in the map.
    static bool is_mapped(const Plan &plan, const MapPlan &map, const View &view, TensorMap &made) {
        const auto store = [&](int at, auto value) { std::memcpy(made.bytes + at, &value, sizeof value); };
        const int dimensions[] = {1, 2, 0};  // of the tensor, in the map's order; head_dim is the first
        std::copy_n(map.made, sizeof made.bytes, made.bytes);
        store(plan.address_at, reinterpret_cast<uint64_t>(view.begin()));
        for (int number = 0; number < 3; ++number) {
            const int i = dimensions[number];
            const int64_t size = view.shape[i], bytes = size > 1 ? element_bytes * view.strides[i] : alignment;
            if (bytes / alignment > UINT32_MAX) return false;
            store(plan.strides_at + 4 * number, uint32_t(bytes / alignment));
            store(plan.dims_at + 4 * (number + 1), uint32_t(size - 1));
        }
        return true;
    }
};

int64_t launch(const Call &call, void **workspaces, void *stream) {
    const Plan &plan = call.plan;
    Launch launches[max_kernels];
    for (int i = 0; i < plan.num_kernels; ++i)
        if (!launches[i].prepare(call, plan.kernels[i], workspaces)) return left_to_python;
    int status = 0;
    Py_BEGIN_ALLOW_THREADS;  // it waits where the GPU's queue is full
    for (int i = 0; i < plan.num_kernels && !status; ++i) {
        launches[i].config.stream = stream;
        status = plan.launch_kernel(&launches[i].config, plan.kernels[i].function, launches[i].arguments, nullptr);
    }
    Py_END_ALLOW_THREADS;
    return status;
}

bool is_viewed(PyObject *tensor, View &view) {
    return view.is_there = PyObject_TypeCheck(tensor, tensor_type) &&
                           exchange->dltensor_from_py_object_no_sync(tensor, &view) == 0;
}

// An address, or a tensor's.
void *address(PyObject *memory) {
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

// A workspace. What is captured, or new to the stream, is lent by Python.
PyObject *lent(const Call &call, const WorkspacePlan &workspace, PyObject *stream) {
    if (workspace.of_stream != Py_None) {
        const Owned capturing(asked(capturing_name));
        PyObject *kept = capturing.get() == Py_False ? PyDict_GetItemWithError(workspace.of_stream, stream) : nullptr;
        if (kept) return Py_NewRef(kept);
        if (PyErr_Occurred()) return nullptr;
    }
    const Owned sizes(PyTuple_New(call.plan.num_sizes));
    for (int i = 0; sizes && i < call.plan.num_sizes; ++i)
        PyTuple_SET_ITEM(sizes.get(), i, PyLong_FromLongLong(call.sizes[i]));
    return sizes ? PyObject_CallFunctionObjArgs(workspace.lend, stream, sizes.get(), nullptr) : nullptr;
}

// Whether it launched, on torch's current stream; else with a Python error, perhaps. The device is current.
bool is_launched(Call &call) {
    const Plan &plan = call.plan;
    if (!call.is_taken()) return false;
    const Owned index(PyLong_FromLong(plan.device_index));
    const Owned stream(index ? asked(stream_name, index.get()) : nullptr);
    if (!stream) return false;
    Owned memory[max_workspaces];  // the allocator waits until the stream is done
    void *workspaces[max_workspaces];
    for (int i = 0; i < plan.num_workspaces; ++i) {
        memory[i].reset(lent(call, plan.workspaces[i], stream.get()));
        if (!memory[i]) return false;
        workspaces[i] = address(memory[i].get());
    }
    void *stream_at = address(stream.get());
    return !PyErr_Occurred() && launch(call, workspaces, stream_at) == 0;
}

// launch(plan, tensors, softmax_scale) -> whether it launched; tensors in the operation's order, None for one left out
PyObject *py_launch(PyObject *, PyObject *const *given, Py_ssize_t count) {
    if (count != 3 || !PyTuple_Check(given[1])) return PyErr_Format(PyExc_TypeError, "launch takes a plan, a tuple, a scale");
    const auto *plan = static_cast<const Plan *>(PyLong_AsVoidPtr(given[0]));
    const double scale = PyFloat_AsDouble(given[2]);
    if (PyErr_Occurred()) return nullptr;
    Call call{*plan, scale};
    if (PyTuple_GET_SIZE(given[1]) != plan->num_tensors) return Py_NewRef(Py_False);
    for (int i = 0; i < plan->num_tensors; ++i) {
        PyObject *tensor = PyTuple_GET_ITEM(given[1], i);
        if (tensor != Py_None && !is_viewed(tensor, call.views[i])) return left(Py_False);
    }
    return is_launched(call) ? Py_NewRef(Py_True) : left(Py_False);
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
// The tensors of its plans are q, k, v, O and the log-sum-exp.
PyObject *straight(PyObject *onlookers, PyObject *ready, PyObject *const tensors[4], PyObject *causal, PyObject *softmax_scale,
                   PyObject *version, PyObject *with_lse) {
    if (is_anyone(onlookers)) return nullptr;
    View views[5];
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
    if (!o || !lse || !is_viewed(o.get(), views[3]) || (!is_alone && !is_viewed(lse.get(), views[4]))) return nullptr;
    Call call{*plan, scale};
    std::copy_n(views, 5, call.views);
    if (plan->num_tensors != 5 || !is_launched(call)) return nullptr;
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
