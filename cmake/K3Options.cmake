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

# Headers take most of the time to compile; files of a module compiled together read them once. The
# builds for development and the sanitizers compile each alone, and so find a forgotten include.
option(K3_UNITY "Compile the files of a module together, eight at a time" OFF)
function(k3_unity target)
  if(K3_UNITY)
    set_target_properties(${target} PROPERTIES UNITY_BUILD ON UNITY_BUILD_BATCH_SIZE 8)
  endif()
endfunction()

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
