// A softmax that a sink may join when all keys are through.
#pragma once
#include "21_woven_exponentials/woven_softmax.cuh"
#include "softmax/sinks.cuh"

template <class T, int rows>
struct SinkingSoftmax : WovenSoftmax<T, rows> {
    // After `finish`: O and the log-sum-exp of each row with the sink.
    template <class Sink, int head_dim>
    __device__ void join(const Sink &sink, Accumulator<rows, head_dim> &o) {
        this->each_row([&](int b, int h) {
            const float lse = this->m[b][h] + __log2f(this->l[b][h]);
            this->scale_row(o, b, h, sink.share(lse));
            this->m[b][h] = sink.in_log(lse);
            this->l[b][h] = 1.0f;
        });
    }
};
