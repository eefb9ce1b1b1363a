// Stands in for libnvidia-ml.so.1: a GPU whose clock rises with every question, and a part of it.
#include <cstring>

namespace {

int gpu, part;
unsigned mhz = 1400;
bool begun = false;

}  // namespace

extern "C" {

int nvmlInit_v2() {
  begun = true;
  return 0;
}

int nvmlDeviceGetHandleByUUID(const char* uuid, void** device) {
  if (!begun) return 1;
  if (std::strcmp(uuid, "GPU-00112233-4455-6677-8899-aabbccddeeff") == 0) return *device = &gpu, 0;
  if (std::strcmp(uuid, "MIG-ff112233-4455-6677-8899-aabbccddeeff") == 0) return *device = &part, 0;
  return 6;  // NVML_ERROR_NOT_FOUND
}

int nvmlDeviceGetDeviceHandleFromMigDeviceHandle(void* of, void** device) {
  if (of != &part) return 2;
  return *device = &gpu, 0;
}

int nvmlDeviceGetClockInfo(void* device, int clock, unsigned* out) {
  if (device != &gpu || clock != 1) return 2;
  return *out = mhz += 100, 0;
}
}
