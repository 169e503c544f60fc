// The order of tiles of which later ones in a head take longer, as under a causal mask.
#pragma once

// Block and head of tile `number`. The longest of each head come first, so that all SMs end together. Heads are taken in
// sections whose K and V fit into L2.
template <class Int>
__device__ inline void longest_first(Int number, Int blocks, Int heads, Int section, int &block, Int &head) {
    const Int first = number / (section * blocks) * section;  // head of this section
    const Int within = number - first * blocks, together = min(section, heads - first);
    block = blocks - 1 - within / together;
    head = first + within % together;
}
