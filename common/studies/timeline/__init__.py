"""Who does what when in a kernel, by time stamps that it takes on the GPU, in a build of its own.

stamps     PTX -> PTX that takes stamps           build    that as an artifact, by ptxas
events     what a launch left behind, as a CSV    phases   what each warpgroup did from stamp to stamp
record     a launch on the GPU, and what the stamps cost
"""
