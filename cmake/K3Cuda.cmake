# k3_cuda_library: src/k3/kernels/cuda/*.cu, or nothing when K3_CUDA is off (kernels/cuda_stub then
# answers for the same headers). One GPU architecture: 90a.
if(K3_CUDA)
  set(CMAKE_CUDA_ARCHITECTURES 90a)
  enable_language(CUDA)
  # CMake 3.25 does not know CUDA 13's compiler and drops CUDA_STANDARD 20 without a word.
  if(NOT CMAKE_CUDA20_STANDARD_COMPILE_OPTION)
    set(CMAKE_CUDA20_STANDARD_COMPILE_OPTION "-std=c++20")
    set(CMAKE_CUDA20_EXTENSION_COMPILE_OPTION "-std=c++20")
  endif()
  set(CMAKE_CUDA_STANDARD 20)
  set(CMAKE_CUDA_STANDARD_REQUIRED ON)
  find_package(CUDAToolkit REQUIRED)
endif()

function(k3_cuda_library)
  if(NOT K3_CUDA)
    return()
  endif()
  file(GLOB sources CONFIGURE_DEPENDS ${CMAKE_SOURCE_DIR}/src/k3/kernels/cuda/*.cu)
  list(FILTER sources EXCLUDE REGEX "/kda_[a-z_]*\\.cu$")
  add_library(k3_cuda OBJECT ${sources})
  target_include_directories(k3_cuda PUBLIC ${CMAKE_SOURCE_DIR}/src ${CMAKE_SOURCE_DIR}/include)
  target_link_libraries(k3_cuda PUBLIC k3_options CUDA::cudart_static)
endfunction()

# libk3_kda.so: include/k3/kda.h alone, for C, Python and others. It needs libc and, to compute, the
# driver; no C++ library and no CUDA runtime beside it.
function(k3_kda_library)
  set(kernels ${CMAKE_SOURCE_DIR}/src/k3/kernels)
  if(K3_CUDA)
    file(GLOB sources CONFIGURE_DEPENDS ${kernels}/cuda/kda_*.cu)
  else()
    set(sources ${kernels}/cuda_stub/kda_stub.cc)
  endif()
  add_library(k3_kda_objects OBJECT ${sources} ${kernels}/kda_check.cc)
  set_target_properties(k3_kda_objects PROPERTIES POSITION_INDEPENDENT_CODE ON)
  target_include_directories(k3_kda_objects PUBLIC ${CMAKE_SOURCE_DIR}/src ${CMAKE_SOURCE_DIR}/include)
  target_link_libraries(k3_kda_objects PUBLIC k3_options)

  if(K3_CUDA)
    target_link_libraries(k3_kda_objects PUBLIC CUDA::cudart_static)
  endif()
  if(K3_SANITIZE)
    return()  # a plain C program could not load it
  endif()

  set(symbols ${CMAKE_SOURCE_DIR}/cmake/k3_kda.symbols)
  add_library(k3_kda SHARED $<TARGET_OBJECTS:k3_kda_objects>)
  add_library(k3::kda ALIAS k3_kda)
  set_target_properties(k3_kda PROPERTIES LINKER_LANGUAGE CXX EXPORT_NAME kda
    VERSION ${PROJECT_VERSION} SOVERSION ${PROJECT_VERSION_MAJOR}.${PROJECT_VERSION_MINOR}
    LINK_DEPENDS ${symbols})
  target_include_directories(k3_kda INTERFACE $<BUILD_INTERFACE:${CMAKE_SOURCE_DIR}/include>
    $<INSTALL_INTERFACE:include>)
  target_link_libraries(k3_kda PRIVATE $<BUILD_INTERFACE:k3_options>)
  target_link_options(k3_kda PRIVATE LINKER:--version-script=${symbols} -static-libstdc++
    -static-libgcc)
  if(K3_CUDA)
    target_link_libraries(k3_kda PRIVATE $<BUILD_INTERFACE:CUDA::cudart_static>)
  endif()
endfunction()
