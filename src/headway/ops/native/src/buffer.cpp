#include <cstdlib>
#include <new>
#include <utility>

#include "common.h"

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace headway {

namespace {
constexpr size_t HUGE_PAGE = 2u << 20;
}

// Large blocks come zeroed and untouched from the system, so that the threads which fill them also fault them in,
// and a cache costs memory only where it is used.
Buffer::Buffer(size_t bytes) : bytes_(bytes) {
  if (bytes == 0) return;
#if defined(__linux__)
  if (bytes >= HUGE_PAGE) {
    mapped_ = (size_t)round_up((int64_t)bytes, HUGE_PAGE) + HUGE_PAGE;
    base_ = mmap(nullptr, mapped_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (base_ == MAP_FAILED) throw std::bad_alloc();
    data_ = reinterpret_cast<uint8_t*>(round_up((int64_t)base_, HUGE_PAGE));
    const size_t whole = bytes / HUGE_PAGE * HUGE_PAGE;
    madvise(data_, whole, MADV_HUGEPAGE);  // worth 2 to 7 %; refusal does no harm
    if (whole < bytes) madvise(data_ + whole, bytes - whole, MADV_NOHUGEPAGE);  // or the rest costs as much as a whole one
    return;
  }
#endif
  const size_t whole = (size_t)round_up((int64_t)bytes, 64);
  if (posix_memalign(&base_, 64, whole) != 0) throw std::bad_alloc();
  memset(base_, 0, whole);
  data_ = static_cast<uint8_t*>(base_);
}

Buffer::Buffer(Buffer&& other) noexcept { *this = std::move(other); }

Buffer& Buffer::operator=(Buffer&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(base_, other.base_);
  std::swap(bytes_, other.bytes_);
  std::swap(mapped_, other.mapped_);
  return *this;
}

Buffer::~Buffer() {
#if defined(__linux__)
  if (mapped_ != 0) {
    munmap(base_, mapped_);
    return;
  }
#endif
  free(base_);
}

void Buffer::grow(size_t bytes) {
  if (bytes > bytes_) {
    *this = Buffer();  // give the old one back before asking for the new
    *this = Buffer(bytes + bytes / 4);
  }
}

}  // namespace headway
