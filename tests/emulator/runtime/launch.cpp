// Launches: the checks that a driver makes, then the blocks, on one or several OS threads.
#include <algorithm>
#include <atomic>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "cluster.h"

namespace emulator {
namespace {

constexpr unsigned most_blocks_y_z = 65535;
constexpr unsigned most_threads_z = 64;
constexpr size_t most_argument_bytes = 4096;

// Turns a fault inside a kernel into a launch that fails, as on a GPU. AddressSanitizer and
// ThreadSanitizer bring handlers of their own, which say more and end the process.
class FaultHandlers {
 public:
  FaultHandlers() {
    if (asan || tsan) return;
    struct sigaction action{};
    action.sa_sigaction = handle;
    action.sa_flags = SA_SIGINFO | SA_NODEFER | SA_ONSTACK;  // the handler does not return
    for (size_t i = 0; i < count; ++i) sigaction(signals[i], &action, &previous[i]);
  }

  ~FaultHandlers() {
    if (asan || tsan) return;
    for (size_t i = 0; i < count; ++i) sigaction(signals[i], &previous[i], nullptr);
  }

 private:
  static void handle(int signal, siginfo_t* information, void*) {
    Cluster* cluster = Cluster::current();
    // Once: a kernel that wrote over the emulator's own memory makes the handler fault, too.
    static thread_local bool handling = false;
    if (cluster && cluster->is_running() && !handling) {
      handling = true;
      const std::string reason =
          signal == SIGFPE ? "integer division by zero" : cluster->explain_fault(information->si_addr);
      handling = false;
      cluster->fail(reason);
    }
    // Not a kernel's fault: it happens again under the handler that was there before.
    const auto which = std::find(signals, signals + count, signal) - signals;
    sigaction(signal, &previous[which], nullptr);
  }

  static constexpr size_t count = 3;
  static constexpr int signals[count] = {SIGSEGV, SIGBUS, SIGFPE};
  static inline struct sigaction previous[count];
};

// A stack for the handler: a kernel whose own stack overflowed has none left.
class HandlerStack {
 public:
  HandlerStack() : memory_(64 * 1024) {
    stack_t stack{};
    stack.ss_sp = memory_.data();
    stack.ss_size = memory_.size();
    sigaltstack(&stack, &previous_);
  }
  ~HandlerStack() { sigaltstack(&previous_, nullptr); }

 private:
  std::vector<char> memory_;
  stack_t previous_{};
};

// A grid's clusters, along its longer axis no more than the last `most`, in the order in which the OS
// threads take them.
class Queue {
 public:
  Queue(dim3 clusters, size_t most, Order order) : clusters_(clusters) {
    const dim3 all = clusters;
    const bool across = all.x >= all.y;
    const size_t longer = std::max(all.x, all.y), left_out = longer - std::min(longer, most);
    for (size_t i = 0; i < size_t(all.x) * all.y * all.z; ++i) {
      if ((across ? i % all.x : i / all.x % all.y) >= left_out) numbers_.push_back(i);
    }
    order.arrange(numbers_);
  }

  bool take(uint3& cluster) {
    const size_t at = next_++;
    if (at >= numbers_.size()) return false;
    const size_t number = numbers_[at];
    cluster = {
        unsigned(number % clusters_.x), unsigned(number / clusters_.x % clusters_.y),
        unsigned(number / clusters_.x / clusters_.y)};
    return true;
  }

  void stop() { next_ = numbers_.size(); }
  size_t size() const { return numbers_.size(); }

 private:
  const dim3 clusters_;
  std::vector<size_t> numbers_;
  std::atomic<size_t> next_{0};
};

std::string check(const Grid& grid) {
  const dim3 threads = grid.threads, blocks = grid.blocks;
  const size_t count = size_t(threads.x) * threads.y * threads.z;
  const auto refuse = [&](const std::string& what) {
    return std::string(grid.kernel->name) + ": invalid launch: " + what;
  };
  if (!count || count > most_block_threads || threads.z > most_threads_z) {
    return refuse(
        "a block of " + std::to_string(threads.x) + " × " + std::to_string(threads.y) + " × " +
        std::to_string(threads.z) + " threads");
  }
  if (count > grid.kernel->most_threads) {
    return refuse(
        "a block of " + std::to_string(count) + " threads, but __launch_bounds__ says " +
        std::to_string(grid.kernel->most_threads));
  }
  if (!blocks.x || !blocks.y || !blocks.z || blocks.x > 0x7fffffffu || blocks.y > most_blocks_y_z ||
      blocks.z > most_blocks_y_z) {
    return refuse(
        "a grid of " + std::to_string(blocks.x) + " × " + std::to_string(blocks.y) + " × " + std::to_string(blocks.z) +
        " blocks");
  }
  const dim3 ranks = grid.kernel->cluster;
  if (ranks.x * ranks.y * ranks.z > most_cluster_blocks) {
    return refuse("a cluster of more than " + std::to_string(most_cluster_blocks) + " blocks");
  }
  if (blocks.x % ranks.x || blocks.y % ranks.y || blocks.z % ranks.z) {
    return refuse(
        "a grid that is not made of whole clusters of " + std::to_string(ranks.x) + " × " + std::to_string(ranks.y) +
        " × " + std::to_string(ranks.z) + " blocks");
  }
  if (grid.shared_bytes > most_shared_bytes) {
    return refuse(std::to_string(grid.shared_bytes) + " bytes of shared memory");
  }
  if (grid.kernel->argument_bytes > most_argument_bytes) {
    return refuse(std::to_string(grid.kernel->argument_bytes) + " bytes of arguments");
  }
  return "";
}

// How many clusters are run along the longer axis.
size_t most_clusters(const Grid& grid) {
  const char* last = getenv("DDL_EMULATOR_LAST_BLOCKS");
  const std::string name = std::string(grid.kernel->name) + "=";
  const char* found = last ? strstr(last, name.c_str()) : nullptr;
  return found ? strtoull(found + name.size(), nullptr, 10) : ~size_t(0);
}

std::string run(const Grid& grid) {
  const char* order = getenv("DDL_EMULATOR_ORDER");
  const dim3 blocks = grid.blocks, ranks = grid.kernel->cluster;
  const dim3 clusters{blocks.x / ranks.x, blocks.y / ranks.y, blocks.z / ranks.z};
  Queue queue(clusters, most_clusters(grid), Order(order, 0));
  std::mutex lock;
  std::string error;  // of the first cluster that failed

  const auto work = [&](uint64_t worker) {
    static thread_local Cluster cluster;  // keeps its stacks for the next launch
    HandlerStack handler_stack;
    cluster.start_grid(grid, Order(order, worker));
    uint3 index;
    while (queue.take(index)) {
      const std::string failure = cluster.run(index);
      if (failure.empty()) continue;
      queue.stop();
      std::lock_guard<std::mutex> guard(lock);
      if (error.empty()) error = failure;
      break;
    }
    cluster.end_grid();
  };

  const char* threads = getenv("DDL_EMULATOR_THREADS");
  const size_t wanted = threads ? strtoull(threads, nullptr, 10) : 1;
  const size_t workers = std::clamp<size_t>(wanted, 1, queue.size());
  std::vector<std::thread> others;
  for (size_t worker = 1; worker < workers; ++worker) others.emplace_back(work, worker);
  work(0);
  for (std::thread& other : others) other.join();
  return error;
}

}  // namespace

int launch(
    const Kernel& kernel, const unsigned grid[3], const unsigned block[3], Size shared_bytes, void** parameters,
    char* error, Size error_bytes) {
  static std::mutex one_launch;  // signal handlers belong to the whole process
  alignas(16) char arguments[most_argument_bytes];
  const Grid launched{&kernel, arguments, {grid[0], grid[1], grid[2]}, {block[0], block[1], block[2]}, shared_bytes};
  std::string reason = check(launched);
  if (reason.empty()) {
    memcpy(arguments, parameters[0], kernel.argument_bytes);
    std::lock_guard<std::mutex> guard(one_launch);
    FaultHandlers handlers;
    reason = run(launched);
  }
  if (error && error_bytes) snprintf(error, error_bytes, "%s", reason.c_str());
  return reason.empty() ? 0 : 1;
}

}  // namespace emulator
