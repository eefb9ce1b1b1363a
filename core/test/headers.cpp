// Its target precompiles the headers of all tests.
