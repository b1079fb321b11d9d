#include "simd_avx512.h"

#include "kernels_integers.h"
#include "kernels_table.h"

namespace headway {

const Kernels* avx512_kernels() {
  static constexpr Kernels kernels = table("avx512");
  return &kernels;
}

}  // namespace headway
