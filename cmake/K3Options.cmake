# Language level, warnings, sanitizers: what every target of the project is compiled with.
set(CMAKE_CXX_STANDARD 20)
set(CMAKE_CXX_STANDARD_REQUIRED ON)
set(CMAKE_CXX_EXTENSIONS OFF)
set(CMAKE_EXPORT_COMPILE_COMMANDS ON)
if(NOT CMAKE_BUILD_TYPE)
  set(CMAKE_BUILD_TYPE Release CACHE STRING "" FORCE)
endif()

find_program(K3_CCACHE ccache)
if(K3_CCACHE)
  set(CMAKE_CXX_COMPILER_LAUNCHER ${K3_CCACHE})
  set(CMAKE_CUDA_COMPILER_LAUNCHER ${K3_CCACHE})
endif()

add_library(k3_options INTERFACE)
target_compile_options(k3_options INTERFACE $<$<COMPILE_LANGUAGE:CXX>:
  -Wall -Wextra -Wconversion -Wsign-conversion -Wshadow -Wnon-virtual-dtor -Werror
  # Exact mode promises the same bits on every instruction set, so a*b+c never fuses behind our back.
  -ffp-contract=off>)
if(CMAKE_CXX_COMPILER_ID STREQUAL "Clang")
  # libstdc++ 12 calls its own deprecated functions in <algorithm>; only clang complains to us.
  target_compile_options(k3_options INTERFACE -Wno-deprecated-declarations)
endif()
target_compile_options(k3_options INTERFACE $<$<COMPILE_LANGUAGE:CUDA>:
  -Werror=all-warnings -Xcompiler=-Wall,-Wextra,-Wshadow>)
if(K3_SANITIZE)
  set(sanitize -fsanitize=${K3_SANITIZE} -fno-omit-frame-pointer -fno-sanitize-recover=all)
  target_compile_options(k3_options INTERFACE $<$<COMPILE_LANGUAGE:CXX>:${sanitize}>)
  target_link_options(k3_options INTERFACE -fsanitize=${K3_SANITIZE})
endif()
if(K3_FUZZ)
  target_compile_options(k3_options INTERFACE -fsanitize=fuzzer-no-link)
endif()

find_program(K3_LLD ld.lld)
if(K3_LLD)
  target_link_options(k3_options INTERFACE -fuse-ld=lld)
endif()
