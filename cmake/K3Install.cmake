# What `cmake --install` lays down: the program, libk3.a, libk3_kda.so, their public headers, the
# demo model, and the package files behind find_package(k3). Internal headers stay out.
include(GNUInstallDirs)
include(CMakePackageConfigHelpers)

function(k3_install)
  set(package_dir ${CMAKE_INSTALL_LIBDIR}/cmake/k3)
  install(TARGETS k3_program RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR})
  install(TARGETS k3 EXPORT k3Targets ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR})
  if(TARGET k3_kda)
    install(TARGETS k3_kda EXPORT k3Targets LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR})
  endif()
  install(EXPORT k3Targets NAMESPACE k3:: DESTINATION ${package_dir})
  install(DIRECTORY ${CMAKE_SOURCE_DIR}/include/k3 DESTINATION ${CMAKE_INSTALL_INCLUDEDIR})
  install(DIRECTORY ${CMAKE_SOURCE_DIR}/src/k3 DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}
    FILES_MATCHING PATTERN "*.h"
    PATTERN "*_internal.h" EXCLUDE
    PATTERN "*test_util.h" EXCLUDE
    PATTERN "kernels/cpu" EXCLUDE
    PATTERN "kernels/cuda" EXCLUDE
    PATTERN "kernels/cuda_stub" EXCLUDE)
  install(DIRECTORY ${CMAKE_SOURCE_DIR}/models/k3-books-27m
    DESTINATION ${CMAKE_INSTALL_DATADIR}/k3/models)

  configure_package_config_file(${CMAKE_SOURCE_DIR}/cmake/k3Config.cmake.in
    ${CMAKE_BINARY_DIR}/k3Config.cmake INSTALL_DESTINATION ${package_dir})
  write_basic_package_version_file(${CMAKE_BINARY_DIR}/k3ConfigVersion.cmake
    COMPATIBILITY SameMinorVersion)
  install(FILES ${CMAKE_BINARY_DIR}/k3Config.cmake ${CMAKE_BINARY_DIR}/k3ConfigVersion.cmake
    DESTINATION ${package_dir})
endfunction()
