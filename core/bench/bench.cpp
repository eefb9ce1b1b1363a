#include "bench/bench.hpp"

#include <fmt/format.h>
#include <omp.h>

#include <kvlab/error.hpp>

#include <chrono>
#include <cstdint>
#include <cstring>
#include <nlohmann/json.hpp>
#include <optional>

#include "base/buffer.hpp"
#include "base/cuda_graph.hpp"
#include "bench/cases.hpp"
#include "bench/cuda_timing.hpp"
#include "cases/case.hpp"
#include "model/synthetic.hpp"
#include "ops/linear/linear.hpp"
#include "ops/linear/onednn.hpp"

namespace kvlab::bench {
namespace {

// Times a case whose runs need other work before them. One run is not counted.
Times time_prepared(const cases::Case& c, cases::Scene& scene, Stream s, const std::function<void()>& run) {
  using Clock = std::chrono::steady_clock;
  std::vector<double> t;
  CudaGraph graph;
  for (int i = -1; i < c.runs; ++i) {
    stop::check();
    scene.prepare();
    const auto begin = Clock::now();
    double seconds = 0;
    if (s.device() == Device::cuda) {
      if (c.in_graph && i == 0) graph = CudaGraph(s, run);
      seconds = cuda_seconds(s, [&] { graph ? graph.launch(s) : run(); });
    } else {
      run();
      seconds = std::chrono::duration<double>(Clock::now() - begin).count();
    }
    if (i >= 0) t.push_back(seconds);
  }
  std::sort(t.begin(), t.end());
  return {t[t.size() / 2], t.front()};
}

// Times a case of the op's list. A run goes over copies of the input, and the line has the time of one. Nothing if this
// machine lacks a library that the case needs.
std::optional<Line> timed(const cases::Case& c, Device device) {
  stop::check();
  cases::Place place(device);
  const auto scene = c.make(place, c.copies);
  if (!scene) return std::nullopt;
  const auto run = [&] {
    for (int i = 0; i < c.copies; ++i) scene->run(i);
  };
  const Times t = c.prepared               ? time_prepared(c, *scene, place.stream(), run)
                  : device == Device::cuda ? time_graph(place.stream(), run, c.runs)
                                           : time_runs(c.cpu_runs, run);
  Line l{c.op, c.shape, c.kernel.empty() ? scene->kernel() : c.kernel, t.median / c.copies, t.best / c.copies};
  l.bytes = c.work.bytes, l.flops = c.work.flops, l.reads = c.work.reads;
  using Copy = cases::Work::Copy;
  if (c.work.copy == Copy::in_memory)
    l.copy_rate = device == Device::cuda ? cuda_inner_copy_rate(place.stream()) : measure_copy_rate();
  else if (c.work.copy != Copy::none)
    l.copy_rate = cuda_copy_rate(place.stream(), c.work.copy == Copy::to_device);
  return l;
}

// One large product; big enough that packing and threads cost little.
constexpr std::int64_t gemm_m = 1024, gemm_n = 1536, gemm_k = 1536;

double rate_of(DType dtype) {
  std::vector<float> x(gemm_m * gemm_k, 0.5f), y(gemm_m * gemm_n);
  const auto l = ops::Linear::pack(gemm_n, gemm_k, dtype, [](std::int64_t, std::int64_t count, float* out) {
    std::fill_n(out, count * gemm_k, 0.25f);
  });
  const Times t = time_runs(10, [&] { l.apply(x.data(), gemm_k, y.data(), gemm_n, gemm_m); });
  return 2. * gemm_m * gemm_n * gemm_k / t.best;
}

double sgemm_rate(const ops::gemm::OneDnn& onednn) {
  std::vector<float> a(gemm_m * gemm_k, 0.5f), b(gemm_k * gemm_n, 0.25f), c(gemm_m * gemm_n);
  const Times t = time_runs(10, [&] { onednn.sgemm(gemm_m, gemm_n, gemm_k, a.data(), b.data(), c.data()); });
  return 2. * gemm_m * gemm_n * gemm_k / t.best;
}

ModelSetup setup_of(const ModelChoice& choice, const std::string& op, bool cuda) {
  ModelSetup s{choice.model, {}};
  if (s.model.empty()) s.model = cuda ? usual_synthetic : small_synthetic;
  if (choice.batch > 0 || choice.context > 0)
    s.shapes = {{std::max(1, choice.batch), choice.context > 0 ? choice.context : 2048}};
  else if (!cuda)
    s.shapes = {{1, 2048}};
  else if (op == "copy")
    s.shapes = {{8, 10240}};
  else if (op == "decode")
    s.shapes = {{1, 10240}, {8, 32768}};
  else
    s.shapes = {{1, 8192}, {1, 32768}};
  return s;
}

void require_known(const std::vector<std::string>& names) {
  for (const auto& name : names)
    if (std::find(op_names().begin(), op_names().end(), name) == op_names().end())
      throw Error(Errc::config, fmt::format("got bench '{}', wanted {}", name, fmt::join(op_names(), ", ")));
}

std::string text_of(const Line::Beside& b) {
  if (b.step.empty()) return {};
  return fmt::format("  beside {}: {:.3f} ms, alone {:.3f} ms, slowdown {:.1f}%", b.step, b.beside * 1e3, b.alone * 1e3,
                     100 * b.slowdown());
}

bool is_wanted(const std::string& only, const std::string& shape, const std::string& kernel) {
  return (shape + ", " + kernel).find(only) != std::string::npos;
}
[[noreturn]] void no_case(const std::string& only) {
  throw Error(Errc::config, "got no case with '" + only + "' in its shape or kernel, wanted a text of a case's line",
              "kvlab bench");
}

std::string amount(double perSecond, const char* unit) { return fmt::format("{:.1f} G{}/s", perSecond / 1e9, unit); }

}  // namespace

// Every thread reads four streams of its own share and prefetches lines ahead of the hardware. With one plain stream a
// core reads a third less on some machines.
double measure_read_rate() {
  constexpr std::size_t line = 8, streams = 4, ahead = 32 * line;  // in words
  const std::size_t words = (std::size_t{1} << 30) / sizeof(std::uint64_t);
  const Buffer buffer(words * sizeof(std::uint64_t));
  std::uint64_t* data = buffer.as<std::uint64_t>();
#pragma omp parallel for schedule(static)
  for (std::size_t i = 0; i < words; ++i) data[i] = i;
  std::uint64_t sum = 0;
  std::size_t read = 0;
  const Times t = time_runs(7, [&] {
    read = 0;
#pragma omp parallel reduction(+ : sum, read)
    {
      const std::size_t share = words / static_cast<std::size_t>(omp_get_num_threads());
      const std::size_t stream = share / streams / line * line;
      const std::uint64_t* p = data + share * static_cast<std::size_t>(omp_get_thread_num());
      for (std::size_t i = 0; i < stream; i += line)
        for (std::size_t s = 0; s < streams; ++s) {
          const std::uint64_t* x = p + s * stream + i;
          __builtin_prefetch(x + ahead);
          for (std::size_t j = 0; j < line; ++j) sum += x[j];
        }
      read += stream * streams;
    }
  });
  volatile std::uint64_t keep = sum;  // the compiler must not remove the reads
  (void)keep;
  return static_cast<double>(read * sizeof(std::uint64_t)) / t.best;
}

double measure_copy_rate() {
  constexpr std::size_t bytes = std::size_t{256} << 20, piece = std::size_t{1} << 20;
  const Buffer from(bytes), to(bytes);
  std::memset(from.as<std::byte>(), 1, bytes);
  const Times t = time_runs(5, [&] {
#pragma omp parallel for schedule(static)
    for (std::size_t at = 0; at < bytes; at += piece)
      std::memcpy(to.as<std::byte>() + at, from.as<std::byte>() + at, piece);
  });
  return 2. * bytes / t.best;
}

GemmRate measure_gemm_rate() {
  GemmRate best{rate_of(DType::bf16), ops::bf16_kernel()};
  if (const ops::gemm::OneDnn* o = ops::gemm::onednn(); o && best.kernel != "onednn bf16")
    if (const double f32 = sgemm_rate(*o); f32 > best.flop_per_s) best = {f32, "onednn sgemm (f32)"};
  return best;
}

const std::vector<std::string>& op_names() {
  static const std::vector<std::string> names = [] {
    std::vector<std::string> v;
    for (const cases::Case& c : cases::all())  // ordered by op
      if (c.timed() && (v.empty() || v.back() != c.op)) v.push_back(c.op);
    v.insert(v.end(), {"decode", "prefill"});
    return v;
  }();
  return names;
}

bool check(const std::vector<std::string>& names, bool cuda,
           const std::function<void(const std::string&, const std::string&, const std::string&)>& said,
           const std::string& only) {
  require_known(names);
  const Device device = cuda ? Device::cuda : Device::cpu;
  bool equal = true, any = only.empty();
  for (const cases::Case& c : cases::all()) {
    if (!c.timed(device) || (!names.empty() && std::find(names.begin(), names.end(), c.op) == names.end())) continue;
    if (!is_wanted(only, c.shape, c.kernel)) continue;
    any = true;
    stop::check();
    const std::optional<std::string> differs = cases::check(c, device);
    if (!differs) continue;
    said(c.op, c.kernel.empty() ? c.shape : c.shape + ", " + c.kernel, *differs);
    equal = equal && differs->empty();
  }
  if (!any) no_case(only);
  return equal;
}

Report run(std::vector<std::string> names, bool cuda, const ModelChoice& choice, const std::string& only) {
  require_known(names);
  if (names.empty()) names = op_names();
  Report r;
  const Device device = cuda ? Device::cuda : Device::cpu;
  const auto run_ops = [&] {
    for (const std::string& name : op_names()) {
      if (std::find(names.begin(), names.end(), name) == names.end()) continue;
      for (const cases::Case& c : cases::all())
        if (c.op == name && c.timed(device) && is_wanted(only, c.shape, c.kernel))
          if (auto line = timed(c, device)) r.lines.push_back(std::move(*line));
      const auto add = [&](std::vector<Line> of_model) {
        for (Line& line : of_model) r.lines.push_back(std::move(line));
      };
      const ModelSetup setup = setup_of(choice, name, cuda);
      if (!only.empty() && name != "copy") continue;
      if (name == "decode") add((cuda ? cuda_decode_cases : decode_cases)(setup));
      if (name == "prefill") add((cuda ? cuda_prefill_cases : prefill_cases)(setup));
      if (name != "copy" || !cuda) continue;
      std::vector<cases::Recall::Of> ways = recalls_beside_steps();
      std::erase_if(ways, [&](const cases::Recall::Of& of) { return !is_wanted(only, shape_of(of), of.name()); });
      if (!ways.empty()) add(cuda_recall_cases(setup, ways));
    }
    if (r.lines.empty() && !only.empty()) no_case(only);
  };
  if (cuda) {
    ops::require_cuda_for_models("kvlab bench");
    const CudaTimer timer;
    const auto rate = [&] { return cuda_backend()->runtime.read_rate(std::size_t{8} << 30, timer.handle()); };
    r.device = cuda_state();
    r.ceilings.read_before = rate();
    r.ceilings.gemm = cuda_gemm_rate();
    run_ops();
    r.ceilings.read_after = rate();
    r.ceilings.read_bytes_per_s = std::max(r.ceilings.read_before, r.ceilings.read_after);
    return r;
  }
  r.ceilings.threads = omp_get_max_threads();
  r.ceilings.read_before = measure_read_rate();
  r.ceilings.gemm = measure_gemm_rate();
  run_ops();
  r.ceilings.read_after = measure_read_rate();
  r.ceilings.read_bytes_per_s = std::max(r.ceilings.read_before, r.ceilings.read_after);
  if (const GemmRate after = measure_gemm_rate(); after.flop_per_s > r.ceilings.gemm.flop_per_s)
    r.ceilings.gemm = after;
  return r;
}

std::string table(const Report& r) {
  const Ceilings& c = r.ceilings;
  std::string s = fmt::format("memory read {} ({} before, {} after), {}\n", amount(c.read_bytes_per_s, "B"),
                              amount(c.read_before, "B"), amount(c.read_after, "B"),
                              r.device.empty() ? fmt::format("{} threads", c.threads) : r.device);
  if (c.gemm.flop_per_s > 0)
    s += fmt::format("bf16 GEMM   {} ({})\n", amount(c.gemm.flop_per_s, "FLOP"), c.gemm.kernel);
  if (std::min(c.read_before, c.read_after) < 0.9 * c.read_bytes_per_s)
    s += "The read rate moved by more than 10% during this run: something else was using the machine.\n";
  s += fmt::format("\n{:<18} {:<44} {:<18} {:>12} {:>15} {:>9}\n", "op", "shape", "kernel", "median", "achieved",
                   "ceiling");
  for (const Line& l : r.lines)
    s += fmt::format("{:<18} {:<44} {:<18} {:>9.3f} ms {:>15} {:>8.1f}%{}{}\n", l.op, l.shape, l.kernel,
                     l.seconds * 1e3, amount(l.rate(), l.reads ? "B" : "FLOP"), l.percent(c),
                     l.overhead < 0 ? "" : fmt::format("  overhead {:.1f}%", 100 * l.overhead), text_of(l.beside));
  return s;
}

nlohmann::json to_json(const Report& r) {
  const Ceilings& c = r.ceilings;
  nlohmann::json j;
  j["device"] = r.device.empty() ? "cpu" : r.device;
  j["threads"] = c.threads;
  j["read_bytes_per_s"] = c.read_bytes_per_s;
  j["read_bytes_per_s_before"] = c.read_before;
  j["read_bytes_per_s_after"] = c.read_after;
  j["gemm_flop_per_s"] = c.gemm.flop_per_s;
  j["gemm_kernel"] = c.gemm.kernel;
  j["ops"] = nlohmann::json::array();
  for (const Line& l : r.lines)
    j["ops"].push_back({{"op", l.op},
                        {"shape", l.shape},
                        {"kernel", l.kernel},
                        {"seconds_median", l.seconds},
                        {"seconds_best", l.best},
                        {"bytes", l.bytes},
                        {"flops", l.flops},
                        {"ceiling", l.copy_rate > 0 ? "copy"
                                    : l.reads       ? "read"
                                                    : "gemm"},
                        {"rate", l.rate()},
                        {"percent", l.percent(c)}});
  for (std::size_t i = 0; i < r.lines.size(); ++i) {
    const Line& l = r.lines[i];
    if (l.overhead >= 0) j["ops"][i]["overhead_percent"] = 100 * l.overhead;
    if (!l.beside.step.empty())
      j["ops"][i]["beside"] = {{"step", l.beside.step},
                               {"seconds_alone", l.beside.alone},
                               {"seconds_beside", l.beside.beside},
                               {"slowdown_percent", 100 * l.beside.slowdown()}};
  }
  return j;
}

}  // namespace kvlab::bench
