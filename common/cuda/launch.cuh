// What a kernel tells the host of its launch. The build reads it back from the PTX: common/compiler/declaration.py mirrors
// the structures here. What is left out is zero, which is the default.
#pragma once

template <int size, int length>
constexpr void copy_text(char (&to)[size], const char (&from)[length]) {
    static_assert(length <= size, "the text is too long for its place in the declaration");
    for (int i = 0; i < length; ++i) to[i] = from[i];
}

// Strides of a tensor of four dimensions, in elements.
struct TensorStride {
    long long batch, row, head;
};

// A field of a kernel's first argument. The host fills it by its name: a tensor's is its address, or null; `q_stride` has
// the strides of q; any other is a number that the operation knows.
struct Field {
    char name[27], format;  // as Python's struct has it; s: a TensorStride
    unsigned offset;
};

template <int count>
struct Fields {
    Field of[count];
    unsigned end;  // the first byte behind them

    // Those of a struct, and of one derived from it.
    template <int more>
    constexpr Fields<count + more> with(const Fields<more> &others) const {
        Fields<count + more> made{};
        for (int i = 0; i < count; ++i) made.of[i] = of[i];
        for (int i = 0; i < more; ++i) made.of[count + i] = others.of[i];
        made.end = others.end;
        return made;
    }
};

template <class T>
constexpr char format_of(T *const *) { return 'Q'; }
constexpr char format_of(const TensorStride *) { return 's'; }
constexpr char format_of(const int *) { return 'i'; }
constexpr char format_of(const unsigned *) { return 'I'; }
constexpr char format_of(const long long *) { return 'q'; }
constexpr char format_of(const float *) { return 'f'; }

// Members that follow each other from byte `end` of a struct on; `names` has theirs, with commas between. Nothing, where
// they are in another order in the struct.
template <class... Members>
constexpr Fields<sizeof...(Members)> listed(unsigned end, const char *names, const Members &...members) {
    Fields<sizeof...(Members)> made{};
    const unsigned sizes[] = {sizeof(Members)...}, alignments[] = {alignof(Members)...};
    const char formats[] = {format_of(&members)...};
    const void *const places[] = {&members...};
    for (unsigned i = 0; i < sizeof...(Members); ++i) {
        if (i && !(places[i - 1] < places[i])) return {};
        end = (end + alignments[i] - 1) / alignments[i] * alignments[i];
        made.of[i].offset = end, made.of[i].format = formats[i];
        end += sizes[i];
        while (*names == ' ' || *names == ',') ++names;
        for (int n = 0; *names && *names != ','; ++n) made.of[i].name[n] = *names++;
    }
    made.end = end;
    return made;
}

// Within a struct that kernels take first: its fields, in their order.
#define FLASHLADDER_FIELDS(...) \
    constexpr auto fields() const { return listed(0, #__VA_ARGS__, __VA_ARGS__); }

// The same of a struct that is derived from `Base`, which has fields of its own.
#define FLASHLADDER_FURTHER_FIELDS(Base, ...) \
    constexpr auto fields() const { return Base::fields().with(listed(sizeof(Base), #__VA_ARGS__, __VA_ARGS__)); }

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
    unsigned is_dependent;    // it may begin before the kernel before it has ended
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

    // The grid is a multiple of it each way.
    constexpr Launch clusters(unsigned x, unsigned y = 1, unsigned z = 1) const {
        Launch made = *this;
        made.cluster[0] = x, made.cluster[1] = y, made.cluster[2] = z;
        return made;
    }

    // Its CTAs may start when those of the kernel before it in the rung have executed griddepcontrol.launch_dependents or
    // ended. What that kernel writes is there behind griddepcontrol.wait.
    constexpr Launch dependent() const {
        Launch made = *this;
        made.is_dependent = 1;
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
#define FLASHLADDER_KERNEL(entry, Params, ...) \
    extern "C" __constant__ const Launch launch_##entry = (__VA_ARGS__).declared(sizeof(Params), __COUNTER__); \
    extern "C" __constant__ const auto params_##entry = Params{}.fields(); \
    static_assert(sizeof(Params) - params_##entry.end < alignof(Params), #Params " lists all its fields in their order")

// Declares a workspace, in the order of the pointers: FLASHLADDER_WORKSPACE(partial_lse, float, "seqlen_q * num_heads").
#define FLASHLADDER_WORKSPACE(name, type, count) \
    extern "C" __constant__ const WorkspaceSize workspace_##name = {__COUNTER__, sizeof(type), 0, count}

// The same of counters and semaphores. They are zero when a run begins, and the kernels leave them so: the host clears
// nothing between two runs.
#define FLASHLADDER_COUNTERS(name, count) \
    extern "C" __constant__ const WorkspaceSize workspace_##name = {__COUNTER__, sizeof(unsigned), 1, count}
