// What a kernel tells the host of its launch. The build reads it back from the PTX: common/compiler/declaration.py mirrors
// the structures here. What is left out is zero, which is the default.
#pragma once

template <int size, int length>
constexpr void copy_text(char (&to)[size], const char (&from)[length]) {
    static_assert(length <= size, "the text is too long for its place in the declaration");
    for (int i = 0; i < length; ++i) to[i] = from[i];
}

// A tensor that a kernel reads or writes by TMA: its box in rows and columns, and the bytes of a swizzled row (0: none).
struct TensorMap {
    char tensor[8];
    unsigned rows, columns, swizzle_bytes;
};

// The launch of one kernel: threads and dynamic shared memory of a CTA, and its tile.
struct Launch {
    unsigned num_threads, shared_bytes, block_m, block_n;
    unsigned params_bytes;    // size of its first argument
    unsigned order;           // the kernels of a rung run in the order in which they are declared
    unsigned ctas_per_sm;     // of a persistent grid; 0: a CTA for each tile
    unsigned cluster[3];      // CTAs of a cluster; 0: one
    char grid[3][48];         // tiles along x, y, z, as arithmetic over what the host knows; "": as below
    TensorMap tensor_maps[4];

    // Tiles along x, y and z; without it cdiv(seqlen_q, block_m), num_heads and batch.
    template <int x_length, int y_length, int z_length>
    constexpr Launch over(const char (&x)[x_length], const char (&y)[y_length], const char (&z)[z_length]) const {
        Launch made = *this;
        copy_text(made.grid[0], x);
        copy_text(made.grid[1], y);
        copy_text(made.grid[2], z);
        return made;
    }

    // So many CTAs an SM, all along x, and no more than tiles: each asks a counter, or steps by gridDim.x, for the next.
    constexpr Launch persistent(unsigned ctas = 1) const {
        Launch made = *this;
        made.ctas_per_sm = ctas;
        return made;
    }

    constexpr Launch clusters(unsigned x, unsigned y = 1, unsigned z = 1) const {
        Launch made = *this;
        made.cluster[0] = x, made.cluster[1] = y, made.cluster[2] = z;
        return made;
    }

    template <int length>
    constexpr Launch by_tma(const char (&tensor)[length], unsigned rows, unsigned columns,
                            unsigned swizzle_bytes = 0) const {
        Launch made = *this;
        int i = 0;
        while (made.tensor_maps[i].rows) ++i;
        copy_text(made.tensor_maps[i].tensor, tensor);
        made.tensor_maps[i].rows = rows, made.tensor_maps[i].columns = columns;
        made.tensor_maps[i].swizzle_bytes = swizzle_bytes;
        return made;
    }

    constexpr Launch declared(unsigned params, unsigned number) const {
        Launch made = *this;
        made.params_bytes = params, made.order = number;
        return made;
    }
};

// Memory that the host lends the kernels of a rung for a run: `count` elements, arithmetic over what the host knows.
struct WorkspaceSize {
    unsigned order, element_bytes;
    unsigned zeroed;  // when it is lent
    char count[116];
};

// Declares a kernel that takes `Params` first, and a struct of the rung's workspaces, as pointers, second where there
// are any: FLASHLADDER_KERNEL(combine, AttentionParams, Launch{num_threads, shared_bytes, block_m}.over("seqlen_q", "num_heads", "1")).
#define FLASHLADDER_KERNEL(entry, Params, ...)                                                                       \
    extern "C" __constant__ const Launch launch_##entry = (__VA_ARGS__).declared(sizeof(Params), __COUNTER__)

// Declares a workspace, in the order of the pointers: FLASHLADDER_WORKSPACE(partial_lse, float, "seqlen_q * num_heads").
#define FLASHLADDER_WORKSPACE(name, type, count)                                                                     \
    extern "C" __constant__ const WorkspaceSize workspace_##name = {__COUNTER__, sizeof(type), 0, count}

// The same of counters and semaphores. They are zero when a run begins, and the kernels leave them so: the host clears
// nothing between two runs.
#define FLASHLADDER_COUNTERS(name, count)                                                                            \
    extern "C" __constant__ const WorkspaceSize workspace_##name = {__COUNTER__, sizeof(unsigned), 1, count}
