"""What can keep a kernel from being faster, and what a rung's idea may be against: a closed vocabulary."""

LIMITERS = {
    "scalar_products": "the matrix products, which do without the tensor cores",
    "bank_conflicts": "bank conflicts, which lengthen the way of loads and stores of shared memory",
    "copies": "waiting for tiles: for copies from global memory, and for the other warps at barriers",
    "fragment_loads": "loading fragments from shared memory (ldmatrix), and waiting for them",
    "softmax": "the softmax: FP32 arithmetic, comparisons, shuffles, exponentials and rounding",
    "address_arithmetic": "address arithmetic, and counting",
    "moves": "copies from one register to another, and registers set to zero",
    "spills": "register spills: stores and loads of local memory",
}
