// The bodies of all kernels, for an ISA without dot products of its own. Included after its TileOps<Int8>.
// clang-format off
#include "kernels/attention-inl.h"
#include "kernels/register_tile-inl.h"
#include "kernels/clustering-inl.h"
#include "kernels/ranking-inl.h"
#include "kernels/codes-inl.h"
#include "kernels/packed-inl.h"
#include "kernels/elementwise-inl.h"
// clang-format on
