#include "run/progress.hpp"

#include <fmt/format.h>

#include <algorithm>

#include "base/log.hpp"

namespace kvlab {
namespace {

double seconds_since(std::chrono::steady_clock::time_point t) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - t).count();
}

}  // namespace

std::string duration_text(double seconds) {
  const long s = std::max(0L, static_cast<long>(seconds + 0.5));
  if (s < 60) return fmt::format("{} s", s);
  if (s < 3600) return fmt::format("{} min {:02} s", s / 60, s % 60);
  return fmt::format("{} h {:02} min", s / 3600, s % 3600 / 60);
}

Progress::Progress(int cells, bool shown) : cells_(cells), shown_(shown) {}
Progress::~Progress() { log::status(""); }

void Progress::skip() {
  ++skipped_;
  ++done_;
}

// Estimates the time of the cells that are left by the time per cell so far.
std::string Progress::eta(double part_of_cell) const {
  const double ran = done_ - skipped_ + part_of_cell;
  if (ran < 0.05) return "";
  const double left = seconds_since(start_) / ran * (cells_ - skipped_ - ran);
  return fmt::format(", about {} left", duration_text(left));
}

void Progress::begin(const std::string& name) {
  name_ = name;
  cell_start_ = Clock::now();
  item("starting", 0, 1);
}

void Progress::item(const std::string& pass, int done, int total) {
  if (!shown_ || seconds_since(drawn_) < 0.1) return;
  drawn_ = Clock::now();
  log::status(fmt::format("[{}/{}] {}: {} {}/{}{}", done_ + 1, cells_, name_, pass, done, total,
                          eta(static_cast<double>(done) / std::max(1, total) * 0.5)));
}

void Progress::say(const std::string& line, const std::string& outcome) const {
  if (!shown_) return;
  log::status("");
  outcome == "ok" || outcome.starts_with("ok, ") ? log::info(line) : log::error(line);
}

void Progress::end(const std::string& outcome) {
  ++done_;
  say(fmt::format("[{}/{}] {}: {} in {}{}", done_, cells_, name_, outcome, duration_text(seconds_since(cell_start_)),
                  done_ < cells_ ? eta(0) : ""),
      outcome);
}

void Progress::waiting(std::size_t running, const std::string& where) {
  if (!shown_ || seconds_since(drawn_) < 0.5) return;
  drawn_ = Clock::now();
  log::status(fmt::format("[{}/{}] {} {} under way on {}{}", done_, cells_, running, running == 1 ? "cell" : "cells",
                          where, eta(0)));
}

void Progress::ended_elsewhere(const std::string& name, const std::string& outcome) {
  ++done_;
  say(fmt::format("[{}/{}] {}: {}{}", done_, cells_, name, outcome, done_ < cells_ ? eta(0) : ""), outcome);
}

}  // namespace kvlab
