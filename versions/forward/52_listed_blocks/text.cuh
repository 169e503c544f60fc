// Sizes of a declaration whose text depends on the configuration.
#pragma once
#include "launch.cuh"

// Parts behind each other, as one text. What is longer than its place does not compile.
template <int size>
struct Text {
    char of[size]{};

    template <class... Parts>
    constexpr explicit Text(const Parts *...parts) {
        int end = 0;
        for (const char *part : {parts...})
            while (*part) of[end++] = *part++;
        of[end] = 0;
    }
};

using Count = Text<sizeof(WorkspaceSize::count)>;

constexpr WorkspaceSize workspace_of(unsigned order, unsigned element_bytes, unsigned zeroed, const Count &count) {
    WorkspaceSize made{order, element_bytes, zeroed, {}};
    copy_text(made.count, count.of);
    return made;
}

// FLASHLADDER_WORKSPACE and FLASHLADDER_COUNTERS of such a text.
#define FLASHLADDER_WORKSPACE_OF(name, type, count) \
    extern "C" __constant__ const WorkspaceSize workspace_##name = workspace_of(__COUNTER__, sizeof(type), 0, count)
#define FLASHLADDER_COUNTERS_OF(name, count) \
    extern "C" __constant__ const WorkspaceSize workspace_##name = workspace_of(__COUNTER__, sizeof(unsigned), 1, count)
