#include "block.h"

namespace emulator {

std::string place(Site site) {
  return std::string(site.operation) + " (" + site.file + ":" + std::to_string(site.line) + ")";
}

// The compiler keeps equal literals of a translation unit once.
bool same(Site a, Site b) { return a.line == b.line && a.operation == b.operation && a.file == b.file; }

std::string Thread::whereabouts() const {
  if (state == State::returned) return "returned from the kernel";
  if (state == State::ready) return "can run";
  return "waiting at " + place(site);
}

void* Block::counterpart(const Block& own, const void* address) {
  const auto offset = [&](const SharedArray& array) { return static_cast<const char*>(address) - array.start(); };
  const auto holds = [&](const SharedArray& array) {
    return offset(array) >= 0 && size_t(offset(array)) < array.bytes();
  };
  if (holds(*own.dynamic)) return dynamic->start() + offset(*own.dynamic);
  for (const auto& [declaration, array] : own.statics) {
    const auto found = statics.find(declaration);
    if (holds(array)) return found == statics.end() ? nullptr : found->second.start() + offset(array);
  }
  return nullptr;
}

bool Block::overrun_at(const void* address) const {
  bool overrun = dynamic->overrun_at(address);
  for (const auto& entry : statics) overrun |= entry.second.overrun_at(address);
  return overrun;
}

}  // namespace emulator
