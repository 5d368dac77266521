// The bodies of all kernels, for an ISA without dot products of its own.
// clang-format off
#include "kernels/tile_ops-inl.h"
#include "kernels/tile_ops_int8-inl.h"
template <>
struct TileOps<Int8> : Int8Ops {};
#include "kernels/attention-inl.h"
#include "kernels/register_tile-inl.h"
#include "kernels/clustering-inl.h"
#include "kernels/ranking-inl.h"
#include "kernels/codes-inl.h"
#include "kernels/packed-inl.h"
#include "kernels/elementwise-inl.h"
// clang-format on
