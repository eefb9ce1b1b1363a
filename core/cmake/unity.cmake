# Joins sources, so that a compiler reads their headers and instantiates their templates once. A joined file takes a
# quarter to a half less time than its parts, but all of it is compiled again when one part changes.
option(KVLAB_UNITY "compile several files at once, for a build of everything" OFF)
set(KVLAB_UNITY_BYTES 65536)  # of the parts of one source
find_program(AWK awk REQUIRED)

# kvlab_joined(NAME SOURCES): replaces the test files that the list SOURCES names by files that hold several of them.
# A file that defines macros or specializes a template of another namespace stays alone.
function(kvlab_joined name list)
  if(NOT KVLAB_UNITY)
    return()
  endif()
  set(result)
  set(parts)
  set(bytes 0)
  set(number 0)
  foreach(source ${${list}} "")  # the empty one ends the last parts
    if(source)
      file(STRINGS ${source} alone REGEX "^(#(define|if)|template <>|extern )")
      if(alone)
        list(APPEND result ${source})
        continue()
      endif()
      file(SIZE ${source} size)
      math(EXPR bytes "${bytes} + ${size}")
    endif()
    if(parts AND (bytes GREATER KVLAB_UNITY_BYTES OR NOT source))
      set(joined ${CMAKE_CURRENT_BINARY_DIR}/joined/${name}_${number}.cpp)
      add_custom_command(OUTPUT ${joined} DEPENDS ${parts} ${PROJECT_SOURCE_DIR}/core/cmake/unity.awk
        COMMAND ${AWK} -f ${PROJECT_SOURCE_DIR}/core/cmake/unity.awk ${parts} > ${joined} VERBATIM)
      list(APPEND result ${joined})
      math(EXPR number "${number} + 1")
      set(parts)
      set(bytes ${size})
    endif()
    list(APPEND parts ${source})
  endforeach()
  file(MAKE_DIRECTORY ${CMAKE_CURRENT_BINARY_DIR}/joined)
  set(${list} ${result} PARENT_SCOPE)
endfunction()
