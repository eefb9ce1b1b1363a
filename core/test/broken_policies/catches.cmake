# Runs one test case of the conformance suite on one library. The case must fail without a crash, and its output must
# name the mistake.
execute_process(COMMAND ${CMAKE_COMMAND} -E env KVLAB_CONTRACT_LIBRARY=${LIBRARY} ${SUITE} "${CASE}"
  OUTPUT_VARIABLE output ERROR_VARIABLE output RESULT_VARIABLE result)
if(NOT output MATCHES "test cases: [^\n]* 1 failed")
  message(FATAL_ERROR "got result ${result}, wanted the test case to fail on ${LIBRARY}:\n${output}")
endif()
string(REGEX REPLACE "[ \n]+" " " words "${output}")  # Catch2 wraps long lines
string(FIND "${words}" "${CAUSE}" at)
if(CAUSE STREQUAL "" OR at EQUAL -1)
  message(FATAL_ERROR "got a failure that does not say '${CAUSE}' on ${LIBRARY}:\n${output}")
endif()
