// The threads of CTAs as fibers of one thread of the host, and the ways in which they wait for each other.
//
// A fiber runs until it has to wait, so that it is as far ahead of the others as barriers let it: the lanes of a warp
// too, which meet only at instructions that all of them have. A run is the same each time. Copies and products, which
// the hardware makes beside its threads, are made as early as they may be, or as late. Where nothing can go on any more,
// or a rule of the hardware is broken, the launch ends with a text that says so.
#pragma once

#include <ucontext.h>

#include <functional>
#include <list>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "cuda_on_host.h"

namespace emulated {

/// How a launch goes on: how many CTAs run at a time; in which order threads have their turns, as they are numbered (0),
/// the last first (-1) or at random (a seed); which warps of a CTA (bits) run only where no other can; and whether copies
/// are late, in any order, and products.
struct Schedule {
  int resident, order, starved, late_copies, late_products;
};

struct Meeting {
  int arrived = 0, generation = 0;
  const char* of = nullptr;
};
struct NamedBarrier {
  int expected = 0, arrived = 0, generation = 0;
};
struct Mbarrier {
  int arrivals, left, phase = 0;
  long long bytes = 0;
};

/// A product that the lanes of a warp have asked for: run(this), once all have and it is its time.
struct Product {
  int lanes = 0;
  float* d[32] = {};
  const unsigned* words[32] = {};  // of a factor in registers
  unsigned long long a = 0, b = 0;
  bool adds = false;
  void (*run)(const Product&) = nullptr;
};
struct Warp {
  Meeting meeting;
  unsigned exchanged[2][32][4];
  std::map<int, Product> products;         // by number, until they have run
  std::vector<int> group_ends;             // the number of the first product behind each group
  int issued[32] = {}, groups[32] = {};    // products that each lane has asked for, groups that it has ended
};

/// What threads have read or written in shared memory and not yet fenced: the copy engine and the tensor cores may see
/// it in another order.
class Unfenced {
 public:
  void resize(unsigned bytes, unsigned threads) { counts_.resize(bytes / 4 + 4), of_.resize(threads); }
  void add(unsigned address, int bytes) {
    for (unsigned word = address / 4; word < (address + bytes) / 4; ++word) {
      ++counts_[word];
      of_[threadIdx.x].push_back(word);
    }
  }
  void fence() {
    for (unsigned word : of_[threadIdx.x]) --counts_[word];
    of_[threadIdx.x].clear();
  }
  bool has(unsigned address) const { return counts_[address / 4] != 0; }

 private:
  std::vector<int> counts_;
  std::vector<std::vector<unsigned>> of_;
};

struct Fiber {
  ucontext_t context;
  std::unique_ptr<char[]> stack;
  const int* blocks = nullptr;  // it waits while this is `blocked_by`
  int blocked_by = 0;
  bool polls = false, has_ended = false;
};
struct Cta {
  unsigned block, running;
  std::vector<unsigned char> shared;
  std::vector<Fiber> fibers;
  std::vector<Warp> warps;
  NamedBarrier named[16];
  std::map<unsigned, Mbarrier> mbarriers;
  Unfenced read, written;
};

constexpr int stack_bytes = 1 << 16;
static Schedule schedule;
static Cta* cta;  // of the current thread
static ucontext_t loop;
static bool is_on_fiber;
static std::string fault;
static long long events;  // that somebody may poll for
static std::vector<std::pair<Cta*, std::function<void()>>> copies;  // that are late
static const std::function<void()>* kernel;

static Fiber& current() {
  return cta->fibers[threadIdx.x];
}
static Warp& warp() {
  return cta->warps[threadIdx.x / 32];
}
static void leave() {
  const Place self = threadIdx;
  Cta* const mine = cta;
  swapcontext(&current().context, &loop);
  threadIdx = self, cta = mine;
}
[[noreturn]] static void fail(const std::string& what) {
  fault = what + " (block " + std::to_string(cta->block) + ", thread " + std::to_string(threadIdx.x) + ")";
  if (!is_on_fiber) throw 1;
  setcontext(&loop);
  std::abort();
}
/// Waits while what is looked at `is` this value: of a number of a phase, which only counts up.
static void wait_while(const int& is, int value) {
  if (is != value) return;
  current().blocks = &is, current().blocked_by = value;
  leave();
}
/// For a look at what changes without a barrier.
static void poll() {
  current().polls = true;
  leave();
  current().polls = false;
}
/// Lets the others run first.
static void hand_over() {
  leave();
}

/// Waits for all 32 lanes, each of which is at the same instruction.
static void meet(const char* of) {
  Meeting& at = warp().meeting;
  if (at.arrived != 0 && std::string(at.of) != of) fail(std::string("lanes of a warp are at ") + at.of + " and " + of);
  at.of = of;
  const int generation = at.generation;
  if (++at.arrived == 32)
    at.arrived = 0, ++at.generation;
  else
    wait_while(at.generation, generation);
}
/// The words of all lanes. A lane that is ahead writes to the other buffer, and cannot be further ahead.
template <class T, int count>
static const unsigned (&exchanged(const char* of, const T (&words)[count]))[32][4] {
  static_assert(sizeof words <= 16);
  auto& buffer = warp().exchanged[warp().meeting.generation % 2];
  std::memcpy(buffer[threadIdx.x % 32], words, sizeof words);
  meet(of);
  return buffer;
}

static void enter() {
  (*kernel)();
  for (const auto& [number, product] : warp().products)
    if (product.lanes != 0) fail("a thread ends before its products");
  current().has_ended = true;
  --cta->running;
  setcontext(&loop);
}
static void start(Cta& one, unsigned threads, unsigned shared_bytes) {
  one.running = threads;
  one.shared.assign(shared_bytes, 0xFF);
  one.fibers.resize(threads), one.warps.resize(threads / 32);
  one.read.resize(shared_bytes, threads), one.written.resize(shared_bytes, threads);
  for (Fiber& fiber : one.fibers) {
    fiber.stack.reset(new char[stack_bytes]);
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = fiber.stack.get(), fiber.context.uc_stack.ss_size = stack_bytes;
    fiber.context.uc_link = nullptr;
    makecontext(&fiber.context, enter, 0);
  }
}
/// Returns whether the fiber has run, and did not only look whether it may.
static bool run(Cta& one, unsigned thread) {
  Fiber& fiber = one.fibers[thread];
  if (fiber.has_ended || (fiber.blocks != nullptr && *fiber.blocks == fiber.blocked_by)) return false;
  fiber.blocks = nullptr;
  cta = &one, threadIdx.x = thread, blockIdx.x = one.block;
  const long long before = events;
  const bool polled = fiber.polls;
  is_on_fiber = true;
  swapcontext(&loop, &fiber.context);
  is_on_fiber = false;
  return !polled || events != before || fiber.has_ended;
}
static std::string waiting(const Cta& one) {
  std::string text = " block " + std::to_string(one.block) + ":";
  for (unsigned i = 0; i < one.fibers.size(); i += 32) {
    int waiting = 0;
    for (unsigned lane = 0; lane < 32; ++lane) waiting += !one.fibers[i + lane].has_ended;
    if (waiting != 0) text += " warp " + std::to_string(i / 32) + " (" + std::to_string(waiting) + " lanes)";
  }
  return text;
}
static void check_end(const Cta& one) {
  for (const auto& [address, barrier] : one.mbarriers)
    if (barrier.bytes != 0) fault = "a CTA ends before its copies";
}

/// Runs a grid, its CTAs begun in order, and returns what went wrong.
static std::string launch(unsigned blocks, unsigned threads, unsigned shared_bytes, const std::function<void()>& of) {
  kernel = &of;
  blockDim.x = threads, gridDim.x = blocks;
  fault.clear(), copies.clear();
  std::mt19937 random(schedule.order);
  std::list<Cta> resident;
  for (unsigned next = 0;;) {
    while (next < blocks && static_cast<int>(resident.size()) < schedule.resident) {
      start(resident.emplace_back(), threads, shared_bytes);
      resident.back().block = next++;
    }
    if (resident.empty()) return fault;
    std::vector<std::pair<Cta*, unsigned>> turns;
    for (Cta& one : resident)
      for (unsigned i = 0; i < threads; ++i) turns.push_back({&one, i});
    if (schedule.order < 0) std::reverse(turns.begin(), turns.end());
    if (schedule.order > 0) std::shuffle(turns.begin(), turns.end(), random);
    bool goes_on = false;
    for (const bool starved : {false, true}) {
      if (goes_on) continue;
      for (const auto& [one, thread] : turns)
        if (fault.empty() && (schedule.starved >> thread / 32 & 1) == starved) goes_on = run(*one, thread) || goes_on;
    }
    for (auto one = resident.begin(); one != resident.end();)
      if (one->running == 0)
        check_end(*one), one = resident.erase(one);
      else
        ++one;
    if (!goes_on && fault.empty()) {
      if (copies.empty()) {
        fault = "nothing goes on:";
        for (const Cta& one : resident) fault += waiting(one);
      } else {
        std::swap(copies[random() % copies.size()], copies.back());
        const auto [of, copy] = copies.back();
        copies.pop_back();
        cta = of;
        try {
          copy();
        } catch (int) {
        }
      }
    }
    if (!fault.empty()) return fault;
  }
}

}  // namespace emulated

inline void __syncwarp() {
  emulated::meet("syncwarp");
}
template <class T>
T __shfl_sync(unsigned, T value, int lane) {
  return std::bit_cast<T>(emulated::exchanged("shfl", {value})[lane % 32][0]);
}
template <class T>
T __shfl_xor_sync(unsigned, T value, int mask) {
  return std::bit_cast<T>(emulated::exchanged("shfl", {value})[threadIdx.x % 32 ^ mask][0]);
}
inline unsigned __ballot_sync(unsigned, bool is_set) {
  const auto& all = emulated::exchanged("ballot", {static_cast<unsigned>(is_set)});
  unsigned bits = 0;
  for (int lane = 0; lane < 32; ++lane) bits |= all[lane][0] << lane;
  return bits;
}
inline unsigned __match_any_sync(unsigned, int value) {
  const auto& all = emulated::exchanged("match", {value});
  unsigned bits = 0;
  for (int lane = 0; lane < 32; ++lane) bits |= (all[lane][0] == static_cast<unsigned>(value)) << lane;
  return bits;
}
inline bool __all_sync(unsigned mask, bool is_set) {
  return __ballot_sync(mask, is_set) == mask;
}
inline bool __any_sync(unsigned mask, bool is_set) {
  return __ballot_sync(mask, is_set) != 0;
}
