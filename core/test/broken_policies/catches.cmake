# Runs one test case of the conformance suite on one library: it must fail, and fail as a test does.
execute_process(COMMAND ${CMAKE_COMMAND} -E env KVLAB_CONTRACT_LIBRARY=${LIBRARY} ${SUITE} "${CASE}"
  OUTPUT_VARIABLE output ERROR_VARIABLE output RESULT_VARIABLE result)
if(NOT output MATCHES "test cases: [^\n]* 1 failed")
  message(FATAL_ERROR "got result ${result}, wanted the test case to fail on ${LIBRARY}:\n${output}")
endif()
