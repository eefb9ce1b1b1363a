// One list of cases for each op. The tests of both devices and `kvlab bench` run the same ones: a test compares the op
// with its reference, a bench times it. A file of this folder holds the cases of an op and announces them:
//
//   std::vector<Case> list() { ... }
//   const Announced announced{list};
#pragma once
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "cases/place.hpp"

namespace kvlab::cases {

// Collects what an op gave that differs from its reference.
class Check {
 public:
  // The largest difference is relative to values above 1. Infinities and NaN must be equal.
  void equal(const std::string& what, const std::vector<float>& got, const std::vector<float>& wanted, double most);
  // For lists: empty if equal.
  void equal(const std::string& what, const std::vector<std::int32_t>& got, const std::vector<std::int32_t>& wanted);
  // A distance that the case computed itself.
  void within(const std::string& what, double got, double most);
  void that(const std::string& what, bool holds);
  // Prefixes what is said until the returned object dies.
  class Scope {
   public:
    Scope(Check& check, const std::string& text) : check_(check), size_(check.prefix_.size()) {
      check_.prefix_ += text + ": ";
    }
    ~Scope() { check_.prefix_.resize(size_); }
    Scope(const Scope&) = delete;

   private:
    Check& check_;
    std::size_t size_;
  };
  [[nodiscard]] Scope in(const std::string& text) { return Scope(*this, text); }

  int made() const { return made_; }                 // comparisons so far
  const std::string& text() const { return text_; }  // a line for each difference; empty = none

 private:
  void report(const std::string& what, const std::string& how);
  std::string prefix_, text_;
  int made_ = 0, differences_ = 0;
};

// A case's inputs at a place, with as many copies as asked for. All copies have the same content.
class Scene {
 public:
  virtual ~Scene() = default;
  // Work that each run needs before it and that is not timed (Case::prepared).
  virtual void prepare() {}
  // Calls the op on one copy. It allocates nothing after the first call, so that a graph can hold it.
  virtual void run(int copy) = 0;
  // Calls the op on the first copy and compares it with its reference.
  virtual void check(Check& check) = 0;
  // The kernel that took it, if Case::kernel cannot say so because the machine chooses.
  virtual std::string kernel() const { return {}; }
};

// What one run must move and compute.
struct Work {
  double bytes = 0, flops = 0;
  bool reads = true;  // it is held against the machine's read rate; else against its rate of products
  // Or against a plain copy: from or to pinned memory, or within the device's own, where bytes are read and written.
  enum class Copy { none, to_device, to_host, in_memory } copy = Copy::none;
};

struct Case {
  std::string op;     // as `kvlab bench` names it
  std::string shape;  // unique in its op and kernel
  // Null: this machine lacks a library that the case needs.
  std::function<std::unique_ptr<Scene>(Place&, int copies)> make;
  bool cpu = true, cuda = true;  // the devices that check it
  // The devices that time it. A timed case is too large for the tests: `kvlab bench --check` checks it.
  bool timed_cpu = false, timed_cuda = false;
  Work work;
  std::string kernel;     // that takes it, for the table; may be empty
  int copies = 1;         // that one timed run goes over, so that no cache holds the input
  int runs = 30;          // on a GPU, and of a prepared case
  int cpu_runs = 10;      // at least, on the CPU
  bool prepared = false;  // Scene::prepare comes before each run, which is timed alone
  bool in_graph = false;  // of a prepared case: on a GPU a graph holds the run, in place of events around it

  bool timed() const { return timed_cpu || timed_cuda; }
  bool tested(Device d) const { return !timed() && (d == Device::cpu ? cpu : cuda); }
  bool timed(Device d) const { return d == Device::cpu ? timed_cpu : timed_cuda; }
};

// A case that is only checked.
template <class F>
Case checked(std::string op, std::string shape, F check) {
  struct Only final : Scene {
    Place& place;
    F f;
    Only(Place& p, const F& g) : place(p), f(g) {}
    void run(int) override {}
    void check(Check& c) override { f(place, c); }
  };
  Case c{std::move(op), std::move(shape)};
  c.make = [check = std::move(check)](Place& p, int) { return std::make_unique<Only>(p, check); };
  return c;
}

// Copies of an input so large together that no cache holds them: at least `beyond` bytes, at most `most` copies.
int copies_beyond(double bytes, double beyond, int most);

// All cases, ordered by op. Those of an op are in the order of its list.
const std::vector<Case>& all();

// Announces a list when the library is loaded.
struct Announced {
  explicit Announced(std::vector<Case> (*list)());
};

// Makes the case at a new place of the device and checks it. Empty, or what differs. Nothing if this machine lacks a
// library that the case needs.
std::optional<std::string> check(const Case& c, Device device);

}  // namespace kvlab::cases
