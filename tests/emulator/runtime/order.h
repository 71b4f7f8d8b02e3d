// The order in which runnable threads run, and blocks too. CUDA promises none, so results must not
// depend on it.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <utility>
#include <vector>

namespace emulator {

class Order {
 public:
  // "0" or null: threads in ascending order, the warps in turn. "1": in descending order, and a
  // warp runs as far as it gets before another one does. Any other number: the seed of a random
  // order.
  Order(const char* text, uint64_t worker) {
    const uint64_t number = text ? strtoull(text, nullptr, 10) : 0;
    kind_ = number == 0 ? Kind::forward : number == 1 ? Kind::reverse : Kind::random;
    state_ = 0x9e3779b97f4a7c15u * (number + 1) + worker;
  }

  template <class T>
  void arrange(std::vector<T>& items) {
    if (kind_ == Kind::reverse) std::reverse(items.begin(), items.end());
    if (kind_ != Kind::random) return;
    for (size_t left = items.size(); left > 1; --left) {
      std::swap(items[left - 1], items[next() % left]);
    }
  }

  // Whether threads that have just become runnable go ahead of those that have waited longer.
  bool newest_first() { return kind_ == Kind::reverse || (kind_ == Kind::random && next() % 2 == 0); }

 private:
  enum class Kind { forward, reverse, random };

  uint64_t next() {  // xorshift64; the low bits of its product are too regular to use
    state_ ^= state_ << 13;
    state_ ^= state_ >> 7;
    state_ ^= state_ << 17;
    return state_ >> 20;
  }

  Kind kind_;
  uint64_t state_;
};

// The threads that can run, the next one at the front. Neither allocates nor calls the C library
// once it is sized: ThreadSanitizer watches both, and would report what fibers share in there.
class ReadyQueue {
 public:
  void reset(size_t most) {
    items_.resize(most);
    first_ = count_ = 0;
  }

  bool empty() const { return count_ == 0; }

  void push_back(unsigned item) { items_[(first_ + count_++) % items_.size()] = item; }

  void push_front(unsigned item) {
    first_ = (first_ + items_.size() - 1) % items_.size();
    items_[first_] = item;
    ++count_;
  }

  unsigned pop_front() {
    const unsigned item = items_[first_];
    first_ = (first_ + 1) % items_.size();
    --count_;
    return item;
  }

 private:
  std::vector<unsigned> items_;
  size_t first_ = 0, count_ = 0;
};

}  // namespace emulator
