extern "C" int kvlab_absent() { return 1; }
