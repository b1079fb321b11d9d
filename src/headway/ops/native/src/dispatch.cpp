// Which kernels this machine can run. Compiled for the base line.
#include <stdexcept>
#include <string>

#include "kernels.h"

namespace headway {

namespace {

struct Choice {
  const Kernels* (*table)();
  const char* name;
  bool runs;
};

}  // namespace

const Kernels& choose_kernels(const char* name) {
#if defined(HEADWAY_X86)
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
                      __builtin_cpu_supports("avx512vnni");
  const Choice choices[] = {
      {avx512_bf16_kernels, "avx512_bf16", avx512 && __builtin_cpu_supports("avx512bf16")},
      {avx512_kernels, "avx512", avx512},
      {avx2_kernels, "avx2", avx2},
      {scalar_kernels, "scalar", true},
  };
#else
  const Choice choices[] = {{scalar_kernels, "scalar", true}};
#endif
  const std::string wanted = name;
  std::string known;
  for (const Choice& choice : choices) {
    if (choice.runs && (wanted.empty() || wanted == choice.name)) return *choice.table();
    if (choice.runs) known += std::string(known.empty() ? "" : ", ") + choice.name;
  }
  throw std::invalid_argument("no kernels named " + wanted + " for this machine; it runs " + known);
}

}  // namespace headway
