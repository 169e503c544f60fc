// A call of common/run/calls.py in C++, for rungs of one kernel with the usual grid: from tensors to a launch. What is not
// plainly right is left to Python. On torch's stable ABI and without CUDA's headers: the driver's functions are handed
// over. common/run/quick.py builds it, and mirrors Plan.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <cstdint>

namespace {
#ifdef TORCH_VERSION_2_10_0
using torch::stable::detail::from, torch::stable::detail::to;  // they had no namespace before
#endif
using torch::stable::Tensor;

constexpr int64_t left_to_python = -1;  // else the driver's status
constexpr int64_t max_grid_yz = 65535, alignment = 16, element_bytes = 2, longest = 1 << 30;

// Of the CUDA driver API: cuLaunchKernel and cuTensorMapEncodeTiled.
using LaunchKernel = int (*)(void *function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned cta_x,
                             unsigned cta_y, unsigned cta_z, unsigned shared_bytes, void *stream, void **arguments,
                             void **extra);
using EncodeTiled = int (*)(void *map, int type, uint32_t rank, void *address, const uint64_t *dims,
                            const uint64_t *strides, const uint32_t *box, const uint32_t *steps, int interleave,
                            int swizzle, int l2_promotion, int out_of_bounds);

struct MapPlan {
    int tensor;  // q, k, v or o
    uint32_t columns, rows;
    int swizzle;
};

// What does not depend on the tensors.
struct Plan {
    LaunchKernel launch_kernel;
    EncodeTiled encode_tiled;
    void *function;
    double min_scale, max_scale;
    int64_t row_stride, max_row_stride;  // elements; a row_stride of 0: any
    int device, gqa, multiple_q, multiple_k;
    int block_m, num_threads, shared_bytes, most_ctas;  // of a persistent grid; 0: a CTA for each tile
    int num_maps, map_type, l2_promotion;
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

struct View {
    int64_t dim = 0, *sizes = nullptr, *strides = nullptr;
    void *data = nullptr;
    int32_t dtype = -1, device_type = -1, device = -1;

    explicit View(const Tensor &tensor) {
        AtenTensorHandle handle = tensor.get();
        aoti_torch_get_dim(handle, &dim);
        aoti_torch_get_sizes(handle, &sizes);
        aoti_torch_get_strides(handle, &strides);
        aoti_torch_get_data_ptr(handle, &data);
        aoti_torch_get_dtype(handle, &dtype);
        aoti_torch_get_device_type(handle, &device_type);
        aoti_torch_get_device_index(handle, &device);
    }
    bool is_like(const View &other) const { return dim == 4 && std::equal(sizes, sizes + 4, other.sizes); }
    bool goes_with(const View &other) const {
        return dtype == other.dtype && device_type == other.device_type && device == other.device;
    }
    // Rows are contiguous, and begin where copies of 16 bytes may.
    bool has_rows(const Plan &plan) const {
        const int64_t steps = strides[0] | strides[1] | strides[2];
        return strides[3] == 1 && steps * element_bytes % alignment == 0 &&
               reinterpret_cast<uintptr_t>(data) % alignment == 0 && strides[1] <= plan.max_row_stride &&
               (plan.row_stride == 0 || strides[1] == plan.row_stride);
    }
    // As common/run/overlap.py: a stride is always longer than what the shorter ones span.
    bool is_apart_in_itself() const {
        int order[] = {0, 1, 2, 3};
        std::sort(order, order + 4, [&](int a, int b) { return strides[a] < strides[b]; });
        int64_t reach = 0;
        for (int i : order) {
            if (sizes[i] > 1 && strides[i] <= reach) return false;
            reach += (sizes[i] - 1) * strides[i];
        }
        return true;
    }
    bool is_apart_from(const View &other) const { return end() <= other.begin() || other.end() <= begin(); }

   private:
    uintptr_t begin() const { return reinterpret_cast<uintptr_t>(data); }
    uintptr_t end() const {
        int64_t span = 1;
        for (int i = 0; i < 4; ++i) span += (sizes[i] - 1) * strides[i];
        return begin() + element_bytes * span;
    }
};

bool takes(const Plan &plan, const View (&views)[4], double softmax_scale) {
    const auto &[q, k, v, o] = views;
    if (q.dim != 4 || k.dim != 4 || !o.is_like(q) || !v.is_like(k)) return false;
    const int64_t *sizes = q.sizes, *of_k = k.sizes;
    const bool has_all = *std::min_element(sizes, sizes + 4) > 0 && *std::min_element(of_k, of_k + 4) > 0;
    return has_all && std::max(sizes[1], of_k[1]) <= longest && sizes[0] <= longest && sizes[2] <= longest &&
           sizes[0] == of_k[0] && sizes[3] == of_k[3] && k.goes_with(q) && v.goes_with(q) && o.goes_with(q) &&
           q.device == plan.device && (sizes[2] == of_k[2] || (plan.gqa && sizes[2] % of_k[2] == 0)) &&
           sizes[1] % plan.multiple_q == 0 && of_k[1] % plan.multiple_k == 0 &&
           std::all_of(views, views + 4, [&](const View &view) { return view.has_rows(plan); }) &&
           o.is_apart_in_itself() &&
           std::all_of(views, views + 3, [&](const View &view) { return o.is_apart_from(view); }) &&
           plan.min_scale <= softmax_scale && softmax_scale <= plan.max_scale;
}

// As common/run/launch.py: where there is one row, head or sequence only, torch's stride means nothing.
int encode(const Plan &plan, const MapPlan &map, const View &view, TensorMap &made) {
    const int64_t *sizes = view.sizes, *strides = view.strides;
    const auto bytes = [&](int i) -> uint64_t { return sizes[i] > 1 ? element_bytes * strides[i] : alignment; };
    const uint64_t dims[] = {uint64_t(sizes[3]), uint64_t(sizes[1]), uint64_t(sizes[2]), uint64_t(sizes[0])};
    const uint64_t apart[] = {bytes(1), bytes(2), bytes(0)};
    const uint32_t box[] = {map.columns, map.rows, 1, 1}, steps[] = {1, 1, 1, 1};
    return plan.encode_tiled(made.bytes, plan.map_type, 4, view.data, dims, apart, box, steps, 0, map.swizzle,
                             plan.l2_promotion, 0);
}

int64_t launch(const Plan &plan, const View (&views)[4], void *lse, void *counter, void *stream, double softmax_scale) {
    if (!takes(plan, views, softmax_scale)) return left_to_python;
    const int64_t *sizes = views[0].sizes, *of_k = views[1].sizes;
    int64_t x = (sizes[1] + plan.block_m - 1) / plan.block_m, y = sizes[2], z = sizes[0];
    if (plan.most_ctas) {
        if (x * y > longest || x * y * z > longest) return left_to_python;
        x = std::min<int64_t>(x * y * z, plan.most_ctas), y = z = 1;
    }
    if (y > max_grid_yz || z > max_grid_yz) return left_to_python;

    Params params{{}, lse, {}, int(sizes[0]), int(sizes[2]), int(of_k[2]), int(sizes[1]), int(of_k[1]),
                  float(softmax_scale)};
    for (int i = 0; i < 4; ++i) {
        params.tensors[i] = views[i].data;
        std::copy_n(views[i].strides, 3, params.strides[i]);
    }
    TensorMap maps[4];
    for (int i = 0; i < plan.num_maps; ++i)
        if (encode(plan, plan.maps[i], views[plan.maps[i].tensor], maps[i])) return left_to_python;

    void *arguments[3];
    int count = 0;
    arguments[count++] = &params;
    if (counter) arguments[count++] = &counter;
    if (plan.num_maps) arguments[count++] = maps;
    return plan.launch_kernel(plan.function, x, y, z, plan.num_threads, 1, 1, plan.shared_bytes, stream, arguments,
                              nullptr);
}

void *pointer(StableIValue value) { return reinterpret_cast<void *>(to<int64_t>(value)); }

void boxed_launch(StableIValue *stack, uint64_t, uint64_t) {
    const Tensor q = to<Tensor>(stack[0]), k = to<Tensor>(stack[1]), v = to<Tensor>(stack[2]), o = to<Tensor>(stack[3]);
    const View views[] = {View(q), View(k), View(v), View(o)};
    const auto &plan = *static_cast<const Plan *>(pointer(stack[4]));
    const int64_t status = launch(plan, views, pointer(stack[5]), pointer(stack[6]), pointer(stack[7]),
                                  to<double>(stack[8]));
    stack[0] = from(status);
}

STABLE_TORCH_LIBRARY_FRAGMENT(flashladder, library) {
    library.def("launch(Tensor q, Tensor k, Tensor v, Tensor(a!) o, int plan, int lse, int counter, int stream, "
                "float softmax_scale) -> int");
}
STABLE_TORCH_LIBRARY_IMPL(flashladder, CompositeExplicitAutograd, library) { library.impl("launch", &boxed_launch); }
}  // namespace
