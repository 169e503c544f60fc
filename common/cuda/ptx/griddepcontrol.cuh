// Programmatic dependent launch, on Hopper: a kernel starts before the one before it has ended.
#pragma once

// Lets the next kernel start. What this one writes, that one may read only behind wait_for_dependency.
__device__ inline void launch_dependents() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }

// Waits until the kernel before has ended, and all that it wrote is there.
__device__ inline void wait_for_dependency() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
