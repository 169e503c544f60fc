"""What is asked for: operations, problems and their inputs, and the configurations of a kernel.

problem       one call of an operation, and what an operation says of itself
operations/   the built-in ones; others lie with their ladders
inputs        a problem's tensors, with seeded inputs
check         the exact answer, and the verdict on an output
families/     inputs that are hard on an attention kernel, by design, and those of a trained model
buffers       guarded memory
config        compile-time parameters, and GPUs
rules         arithmetic and conditions over them, as text
"""
