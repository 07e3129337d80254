#pragma once

#include <cuda_runtime.h>

/// d (M, N) = op(a) op(b) on the stream; nullptr, or what went wrong. Named by schedule and tile; clusters are 2 x 1.
using CutlassProduct = const char*(cudaStream_t stream, const void* a, const void* b, void* d, int m, int n, int k);

CutlassProduct Pingpong128x128, Cooperative128x128, Cooperative128x256;
