# The instruction sets of the variants of a floor's kernels (base/simd/variants.hpp).
include_guard()

# accelmgr_kernels([FOLDER/]): flags of kernels_portable.cpp, kernels_avx2.cpp and kernels_avx512.cpp of this folder, or of
# FOLDER/ in it. Without those of the last two, on other processors, these compile to no variant.
function(accelmgr_kernels)
  set(_optimized $<$<CONFIG:Release>:-O3>)
  set_source_files_properties(${ARGV0}kernels_portable.cpp PROPERTIES COMPILE_OPTIONS "${_optimized}")
  if(NOT CMAKE_SYSTEM_PROCESSOR MATCHES "x86_64|AMD64")
    return()
  endif()
  set_source_files_properties(${ARGV0}kernels_avx2.cpp PROPERTIES COMPILE_OPTIONS "${_optimized};-mavx2;-mf16c")
  # g++ 12 finds the undefined vectors that its own intrinsics begin with uninitialized (GCC bug 105593).
  set_source_files_properties(${ARGV0}kernels_avx512.cpp PROPERTIES COMPILE_OPTIONS
    "${_optimized};-mavx512f;-mavx512bw;-mavx512vl;-mavx512dq;$<$<CXX_COMPILER_ID:GNU>:-Wno-maybe-uninitialized;-Wno-uninitialized>")
endfunction()
