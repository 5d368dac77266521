#include "kernels/dispatch.h"

#include <cstdlib>
#include <stdexcept>

#if defined(__x86_64__) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace offload {

namespace {

struct Isa {
  const char* name;
  const KernelTable* (*table)() = nullptr;  // null where this is not the architecture
  bool (*supported)() = nullptr;

  bool runs_here() const { return table != nullptr && supported(); }
};

bool always() { return true; }

#if defined(__x86_64__)
bool has_avx2() {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
}
bool has_avx512() {
  return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}
bool has_avx512_vnni() { return has_avx512() && __builtin_cpu_supports("avx512vnni"); }
bool has_avx512_bf16() { return has_avx512_vnni() && __builtin_cpu_supports("avx512bf16"); }
bool request_amx() {
  // CPUID.7.0:EDX bits 22 (AMX-BF16) and 24 (AMX-TILE); Linux grants the tile state to a process on request only.
  unsigned eax = 7, ebx = 0, ecx = 0, edx = 0;
  asm volatile("cpuid" : "+a"(eax), "=b"(ebx), "+c"(ecx), "=d"(edx));
  if ((edx >> 22 & 1) == 0 || (edx >> 24 & 1) == 0 || !has_avx512_bf16()) return false;
#if defined(__linux__)
  constexpr int kRequestPermission = 0x1023, kTileData = 18;
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#else
  return false;
#endif
}
bool has_amx() {
  static const bool granted = request_amx();
  return granted;
}
#endif

// From the least to the most capable. neon is tested under qemu and has not run on hardware yet.
constexpr Isa kIsas[] = {
    {"scalar", scalar_table, always},
#if defined(__aarch64__)
    {"neon", neon_table, always},
#else
    {"neon"},
#endif
#if defined(__x86_64__)
    {"avx2", avx2_table, has_avx2},
    {"avx512", avx512_table, has_avx512},
    {"avx512_vnni", avx512_vnni_table, has_avx512_vnni},
    {"avx512_bf16", avx512_bf16_table, has_avx512_bf16},
    {"amx", amx_table, has_amx},
#else
    {"avx2"},
    {"avx512"},
    {"avx512_vnni"},
    {"avx512_bf16"},
    {"amx"},
#endif
};

std::string joined(const std::vector<std::string>& names) {
  std::string text;
  for (const std::string& name : names) text += (text.empty() ? "" : ", ") + name;
  return text;
}

}  // namespace

std::vector<std::string> available_isas() {
  std::vector<std::string> names;
  for (const Isa& isa : kIsas) {
    if (isa.runs_here()) names.emplace_back(isa.name);
  }
  return names;
}

std::vector<std::string> known_isas() {
  std::vector<std::string> names;
  for (const Isa& isa : kIsas) names.emplace_back(isa.name);
  return names;
}

const KernelTable& kernels_for(const std::string& name) {
  for (const Isa& isa : kIsas) {
    if (name != isa.name) continue;
    if (isa.runs_here()) return *isa.table();
    throw std::invalid_argument("this CPU or build lacks the ISA '" + name +
                                "'; available: " + joined(available_isas()));
  }
  throw std::invalid_argument("unknown ISA '" + name + "'; available: " + joined(available_isas()));
}

const KernelTable& default_kernels() {
  const char* forced = std::getenv("OFFLOAD_ISA");
  return kernels_for(forced != nullptr && *forced != '\0' ? forced : available_isas().back());
}

}  // namespace offload
