// Memory, streams, memory that kernels keep between calls, and the entry of libkvlab_cuda.so.
#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <system_error>
#include <thread>
#include <vector>

#include "base/backend.hpp"
#include "base/cuda.cuh"
#include "base/device_op.hpp"
#include "base/kept_memory.hpp"

namespace kvlab {

namespace cuda {
namespace {

std::size_t free_bytes() {
  std::size_t left = 0, total = 0;
  check(cudaMemGetInfo(&left, &total), "cudaMemGetInfo");
  return left;
}

void* allocate(std::size_t bytes) {
  void* p = nullptr;
  const cudaError_t status = cudaMalloc(&p, bytes);
  if (status == cudaErrorMemoryAllocation) {
    cudaGetLastError();  // the caller gets null instead of an error
    return nullptr;
  }
  check(status, "cudaMalloc");
  return p;
}

// While a graph is being captured nothing may be allocated, so the first step runs outside the capture.
KeptMemory& kept_memory() {
  KeptMemory::Device device;
  device.allocate = allocate;
  device.free = [](void* p) { cudaFree(p); };  // synchronize throws a kernel's error
  device.free_bytes = free_bytes;
  device.zero = [](void* p, std::size_t bytes, void* stream) {
    check(cudaMemsetAsync(p, 0, bytes, stream_of(stream)), "scratch");
    check(cudaStreamSynchronize(stream_of(stream)), "scratch");
  };
  device.wait = [](void* stream) { check(cudaStreamSynchronize(stream_of(stream)), "scratch"); };
  static auto& all = *new KeptMemory(device);  // never deleted: the driver is gone before us
  return all;
}

// Destructors call what frees and deletes. After a kernel's fault CUDA gives its error again from any call; synchronize
// has thrown it by then.
void delete_stream(void* s) {
  cudaStreamSynchronize(stream_of(s));
  kept_memory().drop(s);
  cudaStreamDestroy(stream_of(s));
}

int attribute(cudaDeviceAttr what) {
  int device = 0, value = 0;
  check(cudaGetDevice(&device), "cudaGetDevice");
  check(cudaDeviceGetAttribute(&value, what, device), "cudaDeviceGetAttribute");
  return value;
}

// Sizes of the blocks that pin_in_parallel made.
struct Registered {
  std::mutex mutex;
  std::map<void*, std::size_t> bytes;
};
Registered& registered() {
  static auto* all = new Registered;  // destructors of static objects may still free such memory
  return *all;
}

// Pins large blocks several times faster than cudaHostAlloc: threads take the pages, and huge ones where the system has
// them. Returns null where a step fails.
void* pin_in_parallel(std::size_t bytes) {
  void* block = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (block == MAP_FAILED) return nullptr;
  madvise(block, bytes, MADV_HUGEPAGE);
  constexpr std::size_t piece = std::size_t{64} << 20;
  std::atomic<std::size_t> next = 0;
  std::atomic<bool> failed = false;
  const auto take = [&] {
    for (std::size_t at; !failed && (at = next.fetch_add(piece)) < bytes;)
      if (madvise(static_cast<std::byte*>(block) + at, std::min(piece, bytes - at), MADV_POPULATE_WRITE) != 0)
        failed = true;
  };
  std::vector<std::thread> threads;
  try {
    for (unsigned i = 1; i < std::min(16u, std::thread::hardware_concurrency()); ++i) threads.emplace_back(take);
  } catch (const std::system_error&) {  // the threads that the system gave suffice
  }
  take();
  for (std::thread& t : threads) t.join();
  void* seen = nullptr;
  bool pinned =
      !failed && cudaHostRegister(block, bytes, cudaHostRegisterPortable | cudaHostRegisterMapped) == cudaSuccess;
  if (pinned && (cudaHostGetDevicePointer(&seen, block, 0) != cudaSuccess || seen != block)) {
    cudaHostUnregister(block);
    pinned = false;
  }
  if (!pinned) {
    cudaGetLastError();
    munmap(block, bytes);
    return nullptr;
  }
  const std::lock_guard lock(registered().mutex);
  registered().bytes[block] = bytes;
  return block;
}

void* allocate_pinned(std::size_t bytes) {
  constexpr std::size_t large = std::size_t{256} << 20;
  if (bytes >= large)
    if (void* block = pin_in_parallel(bytes)) return block;
  void* p = nullptr;
  const cudaError_t status = cudaHostAlloc(&p, bytes, cudaHostAllocMapped | cudaHostAllocPortable);
  if (status == cudaErrorMemoryAllocation) {
    cudaGetLastError();
    return nullptr;
  }
  check(status, "cudaHostAlloc");
  return p;
}

void free_pinned(void* block) {
  std::size_t bytes = 0;
  {
    const std::lock_guard lock(registered().mutex);
    const auto found = registered().bytes.find(block);
    if (found != registered().bytes.end()) {
      bytes = found->second;
      registered().bytes.erase(found);
    }
  }
  if (bytes == 0) {
    cudaFreeHost(block);
    return;
  }
  cudaHostUnregister(block);
  munmap(block, bytes);
}

}  // namespace

LeftFree left_free;
int multiprocessors() {
  static const int count = attribute(cudaDevAttrMultiProcessorCount);
  return count;
}
std::int64_t shared_bytes() {
  static const int bytes = attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin);
  return bytes;
}
namespace {

__global__ void flush_kernel(const uint4* data, std::size_t count, unsigned* sink) {
  unsigned sum = 0;
  for (std::size_t i = std::size_t(blockIdx.x) * blockDim.x + threadIdx.x; i < count;
       i += std::size_t(gridDim.x) * blockDim.x)
    sum ^= data[i].x ^ data[i].w;
  if (sum == 0x12345678u) *sink = sum;  // the reads must happen
}

struct Graph {
  cudaGraphExec_t exec = nullptr;
  std::vector<std::unique_ptr<std::byte[]>> read;  // host memory that its copies read
};
thread_local Graph* captured = nullptr;  // the graph of the capture under way
cudaGraphExec_t exec_of(void* graph) { return static_cast<Graph*>(graph)->exec; }

// The flush reads four times the size of the L2 cache. After writes, the graph would pay for the lines' write-back.
void time_graph(void* graph, void* handle, int runs, float* milliseconds) {
  const cudaStream_t stream = stream_of(handle);
  const std::size_t flush = std::size_t(attribute(cudaDevAttrL2CacheSize)) * 4;
  void* memory = nullptr;
  check(cudaMalloc(&memory, flush), "time_graph");
  check(cudaMemsetAsync(memory, 1, flush, stream), "time_graph");
  cudaEvent_t begin, end;
  check(cudaEventCreate(&begin), "time_graph");
  check(cudaEventCreate(&end), "time_graph");
  for (int i = -3; i < runs; ++i) {
    flush_kernel<<<8 * multiprocessors(), 512, 0, stream>>>(static_cast<const uint4*>(memory), flush / 16,
                                                            static_cast<unsigned*>(memory));
    check(cudaEventRecord(begin, stream), "time_graph");
    check(cudaGraphLaunch(exec_of(graph), stream), "time_graph");
    check(cudaEventRecord(end, stream), "time_graph");
    check(cudaEventSynchronize(end), "time_graph");
    if (i >= 0) check(cudaEventElapsedTime(milliseconds + i, begin, end), "time_graph");
  }
  cudaEventDestroy(begin), cudaEventDestroy(end);
  cudaFree(memory);
}

struct Event {
  cudaEvent_t event;
  Event() { check(cudaEventCreate(&event), "cudaEventCreate"); }
  ~Event() { cudaEventDestroy(event); }
};

float elapsed(const Event& begin, const Event& end) {
  check(cudaEventSynchronize(end.event), "cudaEventSynchronize");
  float ms = 0;
  check(cudaEventElapsedTime(&ms, begin.event, end.event), "cudaEventElapsedTime");
  return ms;
}

float time_work(void* handle, void (*work)(void*), void* context) {
  const Event begin, end;
  check(cudaEventRecord(begin.event, stream_of(handle)), "cudaEventRecord");
  work(context);
  check(cudaEventRecord(end.event, stream_of(handle)), "cudaEventRecord");
  return elapsed(begin, end);
}

void copy(void* to, const void* from, std::size_t bytes, void* stream) {
  if (captured) {
    cudaPointerAttributes a;
    check(cudaPointerGetAttributes(&a, from), "cudaPointerGetAttributes");
    if (a.type == cudaMemoryTypeUnregistered) {  // the graph reads it later, when the caller may have freed it
      captured->read.emplace_back(new std::byte[bytes]);
      std::memcpy(captured->read.back().get(), from, bytes);
      from = captured->read.back().get();
    }
  }
  check(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, stream_of(stream)), "cudaMemcpyAsync");
}

void* capture(void* handle, void (*work)(void*), void* context) {
  const cudaStream_t stream = stream_of(handle);
  check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), "capture");
  cudaGraph_t graph = nullptr;
  auto out = std::make_unique<Graph>();
  captured = out.get();
  try {
    work(context);
    captured = nullptr;
  } catch (...) {
    captured = nullptr;
    cudaStreamEndCapture(stream, &graph);
    if (graph) cudaGraphDestroy(graph);
    throw;
  }
  check(cudaStreamEndCapture(stream, &graph), "capture");
  check(cudaGraphInstantiate(&out->exec, graph, cudaGraphInstantiateFlagUseNodePriority), "capture");
  check(cudaGraphDestroy(graph), "capture");
  return out.release();
}

// Either all blocks walk through the data together, or each reads its own piece. The machine decides which is faster.
template <bool Pieces>
__global__ void read_kernel(const uint4* data, std::size_t count, unsigned* sink) {
  constexpr int batch = 8;
  const std::size_t step = Pieces ? blockDim.x : std::size_t(gridDim.x) * blockDim.x;
  const std::size_t stride = std::size_t(batch) * gridDim.x * blockDim.x;
  unsigned sum = 0;
  for (std::size_t i = std::size_t(blockIdx.x) * blockDim.x * (Pieces ? batch : 1) + threadIdx.x; i < count;
       i += stride) {
    uint4 x[batch];
#pragma unroll
    for (int j = 0; j < batch; ++j) x[j] = i + j * step < count ? __ldcs(data + i + j * step) : uint4{};
#pragma unroll
    for (int j = 0; j < batch; ++j) sum ^= x[j].x ^ x[j].y ^ x[j].z ^ x[j].w;
  }
  if (sum == 0x12345678u) *sink = sum;  // the reads must happen
}

__global__ void random_kernel(unsigned* data, std::size_t count) {
  for (std::size_t i = std::size_t(blockIdx.x) * blockDim.x + threadIdx.x; i < count;
       i += std::size_t(gridDim.x) * blockDim.x) {
    unsigned x = static_cast<unsigned>(i) * 2654435761u ^ static_cast<unsigned>(i >> 32);
    x ^= x >> 16, x *= 0x7feb352du, x ^= x >> 15, x *= 0x846ca68bu, x ^= x >> 16;
    data[i] = x;
  }
}

double read_rate(std::size_t bytes, void* handle) {
  const cudaStream_t stream = stream_of(handle);
  unsigned* data = nullptr;
  check(cudaMalloc(&data, bytes), "read_rate");
  random_kernel<<<1024, 256, 0, stream>>>(data, bytes / 4);
  cudaEvent_t begin, end;
  check(cudaEventCreate(&begin), "read_rate");
  check(cudaEventCreate(&end), "read_rate");
  float best = 1e30f;
  for (const auto kernel : {read_kernel<false>, read_kernel<true>})
    for (int i = 0; i < 30; ++i) {
      const int blocks = 2 << i % 5;  // per multiprocessor
      check(cudaEventRecord(begin, stream), "read_rate");
      kernel<<<blocks * multiprocessors(), 512, 0, stream>>>(reinterpret_cast<const uint4*>(data), bytes / 16, data);
      check(cudaEventRecord(end, stream), "read_rate");
      check(cudaEventSynchronize(end), "read_rate");
      float ms = 0;
      check(cudaEventElapsedTime(&ms, begin, end), "read_rate");
      if (ms < best) best = ms;
    }
  cudaEventDestroy(begin), cudaEventDestroy(end);
  check(cudaFree(data), "read_rate");
  return double(bytes) / (best * 1e-3);
}

}  // namespace

void* zeroed(void* stream, const char* tag, std::size_t bytes) { return kept_memory().get(stream, tag, bytes, true); }
void* kept(void* stream, const char* tag, std::size_t bytes) { return kept_memory().get(stream, tag, bytes, false); }

}  // namespace cuda
}  // namespace kvlab

extern "C" bool kvlab_cuda_backend(kvlab::CudaBackend* table, std::string* state) {
  using namespace kvlab;
  using namespace kvlab::cuda;
  int count = 0, driver = 0, runtime = 0;
  cudaDriverGetVersion(&driver), cudaRuntimeGetVersion(&runtime);
  const auto version = [](int v) { return std::to_string(v / 1000) + "." + std::to_string(v % 1000 / 10); };
  if (const cudaError_t status = cudaGetDeviceCount(&count); status != cudaSuccess || count == 0) {
    *state =
        std::string("no usable CUDA device: ") + cudaGetErrorString(status == cudaSuccess ? cudaErrorNoDevice : status);
    if (status == cudaErrorInsufficientDriver)
      *state += " (got a driver for CUDA " + version(driver) + ", wanted one for CUDA " + version(runtime) + ")";
    return false;
  }
  cudaDeviceProp p;
  if (const cudaError_t status = cudaGetDeviceProperties(&p, 0); status != cudaSuccess) {
    *state = std::string("the CUDA device does not answer: ") + cudaGetErrorString(status);
    return false;
  }
  char text[256];
  std::snprintf(text, sizeof text, "%s, %zu MiB, sm_%d%d, driver for CUDA %s, built with CUDA %s, %d device%s", p.name,
                p.totalGlobalMem >> 20, p.major, p.minor, version(driver).c_str(), version(runtime).c_str(), count,
                count == 1 ? "" : "s");
  *state = text;
  if (p.major != 9 || p.minor != 0) {
    *state += ": kvlab's kernels are built for sm_90 (H100, H200)";
    return false;
  }
#ifdef KVLAB_CUDA_QUICK
  constexpr const char* built = " (kernels compiled quickly: times say nothing)";
#else
  constexpr const char* built = "";
#endif
  *state += built;
  std::snprintf(table->device_name, sizeof table->device_name, "%s%s", p.name, built);
  CudaRuntime& r = table->runtime;
  r.allocate = allocate;
  r.free = [](void* x) { cudaFree(x); };
  r.allocate_pinned = allocate_pinned;
  r.free_pinned = free_pinned;
  r.free_bytes = free_bytes;
  r.copy = copy;
  r.fill = [](void* to, int byte, std::size_t bytes, void* stream) {
    check(cudaMemsetAsync(to, byte, bytes, stream_of(stream)), "cudaMemsetAsync");
  };
  r.new_stream = [](bool background) -> void* {
    int least = 0, greatest = 0;
    check(cudaDeviceGetStreamPriorityRange(&least, &greatest), "cudaStreamCreate");
    cudaStream_t s;
    check(cudaStreamCreateWithPriority(&s, cudaStreamNonBlocking, background ? least : greatest), "cudaStreamCreate");
    return s;
  };
  r.delete_stream = delete_stream;
  r.synchronize = [](void* s) { check(cudaStreamSynchronize(stream_of(s)), "cudaStreamSynchronize"); };
  r.capture = capture;
  r.launch = [](void* graph, void* s) { check(cudaGraphLaunch(exec_of(graph), stream_of(s)), "cudaGraphLaunch"); };
  r.delete_graph = [](void* graph) {
    const std::unique_ptr<Graph> all(static_cast<Graph*>(graph));
    cudaGraphExecDestroy(all->exec);
  };
  r.scratch_moves = [] { return kept_memory().moves(); };
  r.time_graph = time_graph;
  r.time = time_work;
  r.new_event = []() -> void* { return new Event; };
  r.delete_event = [](void* e) { delete static_cast<Event*>(e); };
  r.record = [](void* e, void* s) {
    check(cudaEventRecord(static_cast<Event*>(e)->event, stream_of(s)), "cudaEventRecord");
  };
  r.record_at_launch = [](void* e, void* s) {
    check(cudaEventRecordWithFlags(static_cast<Event*>(e)->event, stream_of(s), cudaEventRecordExternal),
          "cudaEventRecordWithFlags");
  };
  r.wait = [](void* e, void* s) {
    check(cudaStreamWaitEvent(stream_of(s), static_cast<Event*>(e)->event), "cudaStreamWaitEvent");
  };
  r.elapsed = [](void* begin, void* end) { return elapsed(*static_cast<Event*>(begin), *static_cast<Event*>(end)); };
  r.passed = [](void* e) {
    const cudaError_t state = cudaEventQuery(static_cast<Event*>(e)->event);
    if (state != cudaErrorNotReady) check(state, "cudaEventQuery");
    return state == cudaSuccess;
  };
  r.read_rate = read_rate;
  table->announced = announced_cuda_ops;
  return true;
}
