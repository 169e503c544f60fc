"""What is asked for: operations, problems and their inputs, and the configurations of a kernel.

operations/   what is computed of which tensors, the exact answer and its tolerance
problem       one call of an operation: seeded inputs, the exact answer, the verdict on an output
families/     inputs that are hard on an attention kernel, by design
buffers       guarded memory
config        compile-time parameters, and GPUs
rules         arithmetic and conditions over them, as text
"""
