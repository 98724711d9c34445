# Files compiled into the program: run as a script by k3_embed, or included for the function.
#   cmake -DOUT=web_files_data.cc -DROOT=folder -DFILES=a;b -P K3Embed.cmake

function(k3_embed_write out root files)
  set(arrays "")
  set(rows "")
  set(index 0)
  foreach(file ${files})
    file(READ ${root}/${file} hex HEX)
    string(REGEX REPLACE "([0-9a-f][0-9a-f])" "'\\\\x\\1'," bytes "${hex}")
    string(APPEND arrays "const char kFile${index}[] = {${bytes}'\\0'};\n")
    string(APPEND rows "    {\"${file}\", {kFile${index}, sizeof kFile${index} - 1}},\n")
    math(EXPR index "${index} + 1")
  endforeach()
  file(WRITE ${out}.new "// Made by cmake/K3Embed.cmake.\n#include \"k3/serve/web_files.h\"\n\n\
namespace k3::serve {\nnamespace {\n\n${arrays}\nconst WebFile kFiles[] = {\n${rows}};\n\n}  // namespace\n\n\
std::span<const WebFile> WebFiles() { return kFiles; }\n\n}  // namespace k3::serve\n")
  file(COPY_FILE ${out}.new ${out} ONLY_IF_DIFFERENT)
endfunction()

if(CMAKE_SCRIPT_MODE_FILE)
  k3_embed_write(${OUT} ${ROOT} "${FILES}")
  return()
endif()

# Adds the files below `folder` to `target` as data.
function(k3_embed target folder)
  set(out ${CMAKE_BINARY_DIR}/generated/web_files_data.cc)
  set(paths ${ARGN})
  list(TRANSFORM paths PREPEND ${folder}/)
  add_custom_command(OUTPUT ${out} DEPENDS ${paths} ${CMAKE_SOURCE_DIR}/cmake/K3Embed.cmake
    COMMAND ${CMAKE_COMMAND} -DOUT=${out} -DROOT=${folder} "-DFILES=${ARGN}"
      -P ${CMAKE_SOURCE_DIR}/cmake/K3Embed.cmake VERBATIM)
  target_sources(${target} PRIVATE ${out})
endfunction()
