# k3_isa_library: compiles *.simd.cc once for each instruction set. Each copy lives in its own
# namespace (K3_ISA) and exports one table of function pointers; scalar fills every slot.
set(K3_ISA_LIBRARIES "" CACHE INTERNAL "")

function(k3_isa_library)
  if(CMAKE_SYSTEM_PROCESSOR MATCHES "x86_64|AMD64")
    set(isas scalar avx2 avx512 avx512bf16 amx)
    set(flags_avx2 -mavx2 -mfma)
    # g++ 12 warns about its own AVX-512 header (its bug 105593).
    set(flags_avx512 -mavx512f -mavx512bw -mavx512dq -mavx512vl -mfma -mprefer-vector-width=512
      -Wno-uninitialized $<$<CXX_COMPILER_ID:GNU>:-Wno-maybe-uninitialized>)
    set(flags_avx512bf16 ${flags_avx512} -mavx512bf16)
    set(flags_amx ${flags_avx512bf16} -mamx-tile -mamx-bf16 -mavx512vnni
      -mavx512vbmi)
  elseif(CMAKE_SYSTEM_PROCESSOR MATCHES "aarch64|arm64")
    set(isas scalar neon)
    set(flags_scalar -DK3_SCALAR)
  else()
    set(isas scalar)
  endif()
  file(GLOB sources CONFIGURE_DEPENDS ${CMAKE_SOURCE_DIR}/src/k3/kernels/cpu/*.simd.cc)
  if(NOT sources)
    return()
  endif()
  set(level -O3)
  if(K3_SANITIZE)
    set(level -O1)  # sanitized intrinsics at -O3 take five times as long to compile
  endif()
  foreach(isa ${isas})
    add_library(k3_isa_${isa} OBJECT ${sources})
    target_include_directories(k3_isa_${isa} PRIVATE ${CMAKE_SOURCE_DIR}/src)
    target_compile_definitions(k3_isa_${isa} PRIVATE K3_ISA=${isa})
    target_compile_options(k3_isa_${isa} PRIVATE ${level} -fno-exceptions ${flags_${isa}})
    target_link_libraries(k3_isa_${isa} PRIVATE k3_options)
    set(K3_ISA_LIBRARIES ${K3_ISA_LIBRARIES} k3_isa_${isa} CACHE INTERNAL "")
  endforeach()
endfunction()
