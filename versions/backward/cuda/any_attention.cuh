// The argument of rungs for Hopper that take any attention, and what they share.
#pragma once
#include "any_tensors.cuh"

using Params = PlainParams;

#include "around_loop.cuh"
