// Which instruction set the kernels run on: the best this CPU has, or what OFFLOAD_ISA names.
#pragma once

#include <string>
#include <vector>

#include "kernels/kernels.h"

namespace offload {

// Names from the least to the most capable, of the ISAs in this build that this CPU and OS can run.
std::vector<std::string> available_isas();
// Names of all ISAs this build knows, whether or not they can run here.
std::vector<std::string> known_isas();
// The table of the named ISA; throws std::invalid_argument naming what is available.
const KernelTable& kernels_for(const std::string& isa);
// OFFLOAD_ISA if set (checked), else the most capable.
const KernelTable& default_kernels();

}  // namespace offload
