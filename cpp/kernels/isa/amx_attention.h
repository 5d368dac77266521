// Attention of the AMX table; null tables elsewhere.
#pragma once

#include "kernels/kernels.h"

namespace offload::amx {

void score(const ScoreArgs& args);    // bf16
void attend(const AttendArgs& args);  // bf16

}  // namespace offload::amx
