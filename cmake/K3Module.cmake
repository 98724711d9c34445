# One folder of src/k3 is one module: an object library, and one test binary for its *_test.cc.
set(K3_MODULES "" CACHE INTERNAL "")

function(k3_module name)
  file(GLOB sources CONFIGURE_DEPENDS ${CMAKE_SOURCE_DIR}/src/k3/${name}/*.cc
    ${CMAKE_SOURCE_DIR}/src/k3/${name}/ref/*.cc ${CMAKE_SOURCE_DIR}/src/k3/${name}/cpu/*.cc)
  list(FILTER sources EXCLUDE REGEX "(_test|\\.simd)\\.cc$")
  if(NOT sources)
    return()
  endif()
  add_library(k3_${name} OBJECT ${sources})
  target_include_directories(k3_${name} PUBLIC ${CMAKE_SOURCE_DIR}/src)
  target_link_libraries(k3_${name} PUBLIC k3_options Threads::Threads fmt::fmt spdlog::spdlog
    nlohmann_json::nlohmann_json)
  set(K3_MODULES ${K3_MODULES} ${name} CACHE INTERNAL "")
endfunction()

# libk3: all modules in one static library.
function(k3_library)
  add_library(k3 STATIC)
  foreach(module ${K3_MODULES})
    target_sources(k3 PRIVATE $<TARGET_OBJECTS:k3_${module}>)
  endforeach()
  foreach(isa_library ${K3_ISA_LIBRARIES})
    target_sources(k3 PRIVATE $<TARGET_OBJECTS:${isa_library}>)
  endforeach()
  target_include_directories(k3 PUBLIC $<BUILD_INTERFACE:${CMAKE_SOURCE_DIR}/src>
    $<INSTALL_INTERFACE:include>)
  target_link_libraries(k3 PUBLIC Threads::Threads fmt::fmt PRIVATE $<BUILD_INTERFACE:k3_options>)
endfunction()
