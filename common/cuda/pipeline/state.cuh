// A ring of tiles goes round and round: its stages, and the phases of their barriers.
#pragma once
#include <stdint.h>

// Where its user is in the ring. `parity` is that of the phase which the user waits for. A consumer begins with 0. The
// producer begins with 1: the phase before the first one counts as ended, as all tiles are empty.
template <int stages>
struct PipelineState {
    uint32_t parity;
    int stage = 0;

    __device__ void advance() {
        if (++stage < stages) return;
        stage = 0;
        parity ^= 1;
    }
};
