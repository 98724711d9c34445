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
  add_library(k3_cuda OBJECT ${sources})
  target_include_directories(k3_cuda PUBLIC ${CMAKE_SOURCE_DIR}/src ${CMAKE_SOURCE_DIR}/include)
  target_link_libraries(k3_cuda PUBLIC k3_options CUDA::cudart_static)
endfunction()
