// What fast_path.cpp is told of a rung that stands ready, Plan, and how it launches by that on tensors that are plainly
// right. common/runtime/plan.py makes plans, and mirrors their structures.
#pragma once
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <ATen/dlpack.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <mutex>

namespace {
constexpr int64_t left_to_python = -1;  // else the driver's status
constexpr int64_t max_grid_yz = 65535, alignment = 16, longest = 1 << 30;
constexpr int max_tensors = 16, max_sizes = 8, max_kernels = 4, max_fields = 48, max_params = 512, max_maps = 4;
constexpr int max_workspaces = 6, max_dimensions = 4;

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
    int dtype_code, dtype_bits, ndim;
    int is_output, is_updated;  // which is written to in place
    int may_be_left_out;
    Number shape[max_dimensions];
};

// Where a kernel is told what: of a tensor its address (A) or strides (s); a Number in 32 bits (i) or 64 (q); the scale (f);
// a number's own 32 bits (F).
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
    int packed;                                  // maps are those of packed sequences, as launch.py has them
    Number num_heads, num_heads_k;
    int gqa;                                     // whether they may differ
    int num_tensors, num_sizes, num_kernels, num_workspaces;
    int64_t multiples[max_sizes];                // each size is one
    TensorPlan tensors[max_tensors];
    KernelPlan kernels[max_kernels];
    WorkspacePlan workspaces[max_workspaces];
};

struct alignas(64) TensorMap {
    char bytes[128];
};

// A tensor of up to four dimensions as DLPack tells of it, copied: Python may change a tensor while it runs. Its memory is
// the tensor's, as long as that lives.
struct View {
    bool is_there = false;
    int ndim;
    DLDataType dtype;
    DLDevice device;
    int64_t shape[max_dimensions], strides[max_dimensions];

    // False for one of more dimensions.
    bool read(const DLTensor &tensor) {
        if (tensor.ndim > max_dimensions) return false;
        ndim = tensor.ndim, dtype = tensor.dtype, device = tensor.device;
        data = static_cast<char *>(tensor.data) + tensor.byte_offset;
        std::copy_n(tensor.shape, ndim, shape);
        std::copy_n(tensor.strides, ndim, strides);
        return is_there = true;
    }
    int element_bytes() const { return dtype.bits / 8; }
    char *begin() const { return is_there ? data : nullptr; }
    // Rows are contiguous, and begin where copies of 16 bytes may.
    bool has_rows(const Plan &plan) const {
        const uint64_t steps = strides[0] | strides[1] | strides[2];
        return strides[3] == 1 && steps * element_bytes() % alignment == 0 &&
               reinterpret_cast<uintptr_t>(begin()) % alignment == 0 && strides[1] <= plan.max_row_stride &&
               (plan.row_stride == 0 || strides[1] == plan.row_stride);
    }
    bool is_contiguous() const { return has_steps_of_new(2); }
    // Strides of dimensions of 1 mean nothing, but what is made like it has the same.
    bool is_like_new() const { return has_steps_of_new(1); }
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
    // Whether it lies between the elements of another of the same shape and strides, which is apart in itself.
    bool is_between(const View &other) const {
        const int64_t bytes = std::abs(begin() - other.begin());
        if (ndim != other.ndim || dtype.bits != other.dtype.bits || !std::equal(shape, shape + ndim, other.shape) ||
            !std::equal(strides, strides + ndim, other.strides) || bytes % element_bytes())
            return false;
        int order[] = {0, 1, 2, 3};
        std::sort(order, order + ndim, [&](int a, int b) { return strides[a] > strides[b]; });
        return !has_distance(bytes / element_bytes(), order, order + ndim);
    }

  private:
    char *data;

    // Whether two elements lie so far from each other along these dimensions, of which each stride is longer than what
    // those behind it span: so there are two numbers of its steps at most that they can make up for.
    bool has_distance(int64_t distance, const int *dimension, const int *last) const {
        if (dimension == last) return distance == 0;
        const int64_t most = shape[*dimension] - 1, stride = strides[*dimension];
        if (most == 0) return has_distance(distance, dimension + 1, last);
        const int64_t below = distance / stride - (distance % stride < 0);
        for (int64_t steps : {below, below + 1})
            if (-most <= steps && steps <= most && has_distance(distance - steps * stride, dimension + 1, last)) return true;
        return false;
    }
    // Whether dimensions of that size on have the strides of a new tensor.
    bool has_steps_of_new(int64_t size) const {
        uint64_t step = 1;  // which overflows where a tensor has no elements
        for (int i = ndim - 1; i >= 0; step *= shape[i--])
            if (shape[i] >= size && uint64_t(strides[i]) != step) return false;
        return true;
    }
    const char *end() const {
        int64_t span = 1;
        for (int i = 0; i < ndim; ++i) span += (shape[i] - 1) * strides[i];
        return begin() + element_bytes() * span;
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
        const int64_t heads = value(plan.num_heads), heads_k = value(plan.num_heads_k);
        return (heads == heads_k || (plan.gqa && heads % heads_k == 0)) && are_apart() &&
               plan.min_scale <= softmax_scale && softmax_scale <= plan.max_scale;
    }

  private:
    bool is_taken(const TensorPlan &asked, const View &view) {
        if (!view.is_there) return asked.may_be_left_out;
        if (!view.begin() || view.ndim != asked.ndim || view.dtype.code != asked.dtype_code || view.dtype.bits != asked.dtype_bits ||
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
    // What is written has a place of its own for each element. What is updated may lie between those of another tensor.
    bool are_apart() const {
        for (int i = 0; i < plan.num_tensors; ++i) {
            const TensorPlan &tensor = plan.tensors[i];
            if ((!tensor.is_output && !tensor.is_updated) || !views[i].is_there) continue;
            if (!views[i].is_apart_in_itself()) return false;
            for (int other = 0; other < plan.num_tensors; ++other)
                if (other != i && views[other].is_there && !views[i].is_apart_from(views[other]) &&
                    (tensor.is_output || !views[i].is_between(views[other])))
                    return false;
        }
        return true;
    }
};

// A kernel's launch, ready but for the stream.
struct Launch {
    LaunchConfig config;
    TensorMap maps[max_maps];
    alignas(16) char params[max_params] = {};  // between fields zero, as in Python
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
        config = {
            {unsigned(grid[0]), unsigned(grid[1]), unsigned(grid[2])},
            {unsigned(kernel.num_threads), 1, 1},
            unsigned(kernel.shared_bytes),
            nullptr,
            kernel.attributes,
            unsigned(kernel.num_attributes),
        };
        return true;
    }
    void put(const Call &call, const FieldPlan &field) {
        const auto store = [&](auto value) { std::memcpy(params + field.at, &value, sizeof value); };
        const auto view = [&]() -> const View & { return call.views[field.number]; };
        switch (field.kind) {
        case 'A': return store(static_cast<void *>(view().begin()));
        case 's':  // of what is left out they stay zero
            if (view().is_there) std::memcpy(params + field.at, view().strides, 3 * sizeof(int64_t));
            return;
        case 'i': return store(int(call.value(field.number)));
        case 'q': return store(call.value(field.number));
        case 'F': return store(field.number);
        case 'f': return store(float(call.softmax_scale));
        }
    }
    // As common/runtime/launch.py: where there is one row, head or sequence only, torch's stride means nothing; and what
    // packed sequences have in place of a batch. False for a stride whose highest bits would lie elsewhere in the map.
    static bool is_mapped(const Plan &plan, const MapPlan &map, const View &view, TensorMap &made) {
        const auto store = [&](int at, auto value) { std::memcpy(made.bytes + at, &value, sizeof value); };
        if (!view.is_there) return false;
        const int dimensions[] = {1, 2, plan.packed ? 1 : 0};  // of the tensor, in the map's order; head_dim is the first
        std::copy_n(map.made, sizeof made.bytes, made.bytes);
        int64_t steps[3];
        for (int number = 0; number < 3; ++number) {
            const int i = dimensions[number];
            const int64_t size = view.shape[i] + (plan.packed && number == 2);
            steps[number] = view.shape[i] > 1 ? view.element_bytes() * view.strides[i] : alignment;
            if (steps[number] / alignment > UINT32_MAX) return false;
            store(plan.strides_at + 4 * number, uint32_t(steps[number] / alignment));
            store(plan.dims_at + 4 * (number + 1), uint32_t(size - 1));
        }
        const uint64_t before = plan.packed ? view.shape[1] * steps[0] : 0;
        store(plan.address_at, reinterpret_cast<uint64_t>(view.begin()) - before);
        return true;
    }
};

// Kernels of one call, with no other call's between them: those find in kept workspaces what the ones before wrote.
int launch_all(const Plan &plan, Launch *launches, void *stream) {
    static std::mutex launching;
    std::unique_lock<std::mutex> alone(launching, std::defer_lock);
    if (plan.num_kernels > 1) alone.lock();
    int status = 0;
    for (int i = 0; i < plan.num_kernels && !status; ++i) {
        launches[i].config.stream = stream;
        status = plan.launch_kernel(&launches[i].config, plan.kernels[i].function, launches[i].arguments, nullptr);
    }
    return status;
}

int64_t launch(const Call &call, void **workspaces, void *stream) {
    const Plan &plan = call.plan;
    Launch launches[max_kernels];
    for (int i = 0; i < plan.num_kernels; ++i)
        if (!launches[i].prepare(call, plan.kernels[i], workspaces)) return left_to_python;
    int status = 0;
    Py_BEGIN_ALLOW_THREADS;  // it waits where the GPU's queue is full
    status = launch_all(plan, launches, stream);
    Py_END_ALLOW_THREADS;
    return status;
}
}  // namespace
