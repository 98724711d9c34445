# One folder of src/k3 is one module: an object library, and one test binary for its *_test.cc.
set(K3_MODULES "" CACHE INTERNAL "")

function(k3_module name)
  set(folder ${CMAKE_SOURCE_DIR}/src/k3/${name})
  set(patterns ${folder}/*.cc ${folder}/ref/*.cc ${folder}/cpu/*.cc
    ${folder}/backward/*.cc)
  if(NOT K3_CUDA)
    list(APPEND patterns ${folder}/cuda_stub/*.cc)
  endif()
  file(GLOB sources CONFIGURE_DEPENDS ${patterns})
  list(FILTER sources EXCLUDE REGEX "(_test|\\.simd)\\.cc$")
  list(FILTER sources EXCLUDE REGEX "/kernels/(cuda_stub/kda_stub|kda_check)\\.cc$")  # k3_kda_objects
  if(NOT sources)
    return()
  endif()
  add_library(k3_${name} OBJECT ${sources})
  if(NOT name STREQUAL kernels)  # generic lambdas in backward/ trip g++ 12 when seen twice
    k3_unity(k3_${name})
  endif()
  target_include_directories(k3_${name} PUBLIC ${CMAKE_SOURCE_DIR}/src ${CMAKE_SOURCE_DIR}/include)
  target_link_libraries(k3_${name} PUBLIC k3_options Threads::Threads fmt::fmt spdlog::spdlog
    nlohmann_json::nlohmann_json)
  set(K3_MODULES ${K3_MODULES} ${name} CACHE INTERNAL "")
endfunction()

# libk3: all modules in one static library. What it links is repeated in cmake/k3Config.cmake.in.
function(k3_library)
  add_library(k3 STATIC)
  add_library(k3::k3 ALIAS k3)
  foreach(module ${K3_MODULES})
    target_sources(k3 PRIVATE $<TARGET_OBJECTS:k3_${module}>)
  endforeach()
  foreach(isa_library ${K3_ISA_LIBRARIES})
    target_sources(k3 PRIVATE $<TARGET_OBJECTS:${isa_library}>)
  endforeach()
  target_sources(k3 PRIVATE $<TARGET_OBJECTS:k3_kda_objects>)
  target_compile_features(k3 PUBLIC cxx_std_20)
  target_include_directories(k3 PUBLIC $<BUILD_INTERFACE:${CMAKE_SOURCE_DIR}/src>
    $<BUILD_INTERFACE:${CMAKE_SOURCE_DIR}/include> $<INSTALL_INTERFACE:include>)
  target_link_libraries(k3 PUBLIC Threads::Threads fmt::fmt nlohmann_json::nlohmann_json
    PRIVATE spdlog::spdlog prometheus-cpp-core z bz2 lzma zstd $<BUILD_INTERFACE:k3_options>)
  if(K3_CUDA)
    target_sources(k3 PRIVATE $<TARGET_OBJECTS:k3_cuda>)
    target_link_libraries(k3 PRIVATE CUDA::cudart_static)
  endif()
endfunction()
