// Which kernels this CPU can run.
#pragma once

namespace ls {

// 0: portable, 1: AVX2, 2: AVX-512.
inline int best_instruction_set() {
#if defined(LS_X86)
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
      __builtin_cpu_supports("avx512dq")) {
    return 2;
  }
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c")) return 1;
#endif
  return 0;
}

}  // namespace ls
