// The tensors of rungs for Hopper that take any attention, as their argument has them.
#pragma once
#include "24_woven_general/alibi.cuh"
#include "24_woven_general/narrower.cuh"
#include "sequence.cuh"
#include "softmax/dropout.cuh"
#include "softmax/softcap.cuh"

#include <type_traits>

using Tensors = std::conditional_t<config::packed, PackedBackwardParams, BackwardParams>;
using BoundedTensors = std::conditional_t<config::window || config::softcap, Bounded<Tensors>, Tensors>;
using BiasedTensors = std::conditional_t<config::alibi, Biased<BoundedTensors>, BoundedTensors>;
using DroppingTensors = std::conditional_t<config::dropout, Dropping<BiasedTensors>, BiasedTensors>;
using PulledTensors = std::conditional_t<config::dlse, WithLseGradient<DroppingTensors>, DroppingTensors>;
using ApartTensors = std::conditional_t<config::dsinks, WithSinkGradient<PulledTensors>, PulledTensors>;
using PlainParams = std::conditional_t<config::narrower, Narrower<ApartTensors>, ApartTensors>;
