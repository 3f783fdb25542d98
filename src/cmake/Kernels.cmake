# The instruction sets of the variants of a floor's kernels (base/simd/variants.hpp).
include_guard()

# accelmgr_kernels(): flags of kernels_avx2.cpp and kernels_avx512.cpp of this folder. Without them, on other
# processors, these compile to no variant.
function(accelmgr_kernels)
  if(NOT CMAKE_SYSTEM_PROCESSOR MATCHES "x86_64|AMD64")
    return()
  endif()
  set_source_files_properties(kernels_avx2.cpp PROPERTIES COMPILE_OPTIONS "-mavx2;-mf16c")
  # g++ 12 finds the undefined vectors that its own intrinsics begin with uninitialized (GCC bug 105593).
  set_source_files_properties(kernels_avx512.cpp PROPERTIES COMPILE_OPTIONS
    "-mavx512f;-mavx512bw;-mavx512vl;-mavx512dq;-Wno-maybe-uninitialized;-Wno-uninitialized")
endfunction()
