#include "kernels/hash.h"

#include "kernels/kernel_table.h"

namespace hvd {

uint64_t hash_memory(const void* memory, size_t bytes) {
  return hash_memory(memory, bytes, best_isa());
}

uint64_t hash_memory(const void* memory, size_t bytes, Isa isa) {
  return kernel_table(isa).hash(memory, bytes);
}

}  // namespace hvd
