#include "simd_scalar.h"

#include "kernels_integers.h"
#include "kernels_table.h"

namespace headway {

const Kernels* scalar_kernels() {
  static constexpr Kernels kernels = table("scalar");
  return &kernels;
}

}  // namespace headway
