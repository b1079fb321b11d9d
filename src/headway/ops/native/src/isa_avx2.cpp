#include "simd_avx2.h"

#include "kernels_pairs.h"
#include "kernels_table.h"

namespace headway {

const Kernels* avx2_kernels() {
  static constexpr Kernels kernels = table("avx2");
  return &kernels;
}

}  // namespace headway
