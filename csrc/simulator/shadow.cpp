#include "shadow.h"

#include <sched.h>

#include <algorithm>
#include <cstdlib>
#include <new>

namespace metal_attn::simulator {
namespace {

constexpr uint32_t kSpinsBeforeYield = 100;

// Bit k of entry i is 1 if unordered accesses of kinds i and k conflict.
constexpr uint8_t kConflicting[kAccessKinds] = {
    1 << kWrite | 1 << (kAtomic | kWrite),
    1 << kRead | 1 << kWrite | 1 << kAtomic | 1 << (kAtomic | kWrite),
    1 << kWrite,
    1 << kRead | 1 << kWrite,
};

// Where an earlier access was made, from near to far. All values except kOrdered are conflicts.
enum class Distance : uint8_t { kOrdered, kOtherLane, kOtherSimdgroup, kOtherThreadgroup };

inline Distance unless_known(Distance distance, const Touch& earlier, const Access& now) {
  bool known = now.known && covers(*now.known, now.clock.owner(earlier.interval),
                                   now.clock.threadgroup(), earlier, now.memory);
  return known ? Distance::kOrdered : distance;
}

inline Distance distance(const Touch& earlier, const Access& now) {
  const Clock& clock = now.clock;
  if (earlier.interval < clock.settled()) return Distance::kOrdered;
  if (clock.foreign(earlier.interval))
    return unless_known(Distance::kOtherThreadgroup, earlier, now);
  if (earlier.interval < clock.epoch() || earlier.thread == now.touch.thread)
    return Distance::kOrdered;
  if (earlier.simdgroup() != now.touch.simdgroup())
    return unless_known(Distance::kOtherSimdgroup, earlier, now);
  if (earlier.interval < now.since) return Distance::kOrdered;
  return unless_known(Distance::kOtherLane, earlier, now);
}

// True in the most common case: all accesses were before the last barrier.
inline bool all_settled(const Touch* touches, uint32_t begin, uint32_t end, uint32_t settled) {
  for (uint32_t i = begin; i < end; ++i)
    if (touches[i].interval >= settled) return false;
  return true;
}

// Locks a page of device memory, which host threads share. held: null if nothing is to be locked.
class Lock {
 public:
  explicit Lock(std::atomic<bool>* held) : held_(held) {
    if (!held_) return;
    for (uint32_t spins = 1; held_->exchange(true, std::memory_order_acquire); ++spins)
      if (spins % kSpinsBeforeYield == 0) sched_yield();
  }
  ~Lock() {
    if (held_) held_->store(false, std::memory_order_release);
  }

 private:
  std::atomic<bool>* held_;
};

// Allocates the entries of one kind at their first use. Null if there is too little memory.
inline Touch* entries(ShadowPage& page, Touch** list) {
  if (!*list) *list = static_cast<Touch*>(calloc(kShadowPageBytes >> page.shift, sizeof(Touch)));
  return *list;
}

bool split(ShadowPage& page, uint32_t shift) {
  for (Touch** lists : {page.last, page.far}) {
    for (uint32_t kind = 0; kind < kAccessKinds; ++kind) {
      if (!lists[kind]) continue;
      auto* finer = static_cast<Touch*>(malloc((kShadowPageBytes >> shift) * sizeof(Touch)));
      if (!finer) return false;
      for (uint32_t i = 0; i < kShadowPageBytes >> shift; ++i)
        finer[i] = lists[kind][i >> (page.shift - shift)];
      free(lists[kind]);
      lists[kind] = finer;
    }
  }
  page.shift = static_cast<uint8_t>(shift);
  return true;
}

inline ConflictReport check(const ShadowPage& page, uint32_t begin, uint32_t end,
                            const Access& now) {
  if (now.reads && now.memory == kThreadgroupMemory) {
    const Touch* plain = page.last[kWrite];
    const Touch* atomic = page.last[kAtomic | kWrite];
    for (uint32_t i = begin; i < end; ++i) {
      if (plain && plain[i].interval >= now.clock.first()) continue;
      if (atomic && atomic[i].interval >= now.clock.first()) continue;
      return {Conflict::kUninitialised, i << page.shift, now.touch, now.kind};
    }
  }
  for (uint32_t kinds = kConflicting[now.kind]; kinds; kinds &= kinds - 1) {
    uint32_t kind = static_cast<uint32_t>(__builtin_ctz(kinds));
    const Touch* last = page.last[kind];
    // If the last access is settled, so is the far one.
    if (!last || all_settled(last, begin, end, now.clock.settled())) continue;
    for (const Touch* touches : {last, static_cast<const Touch*>(page.far[kind])}) {
      for (uint32_t i = begin; touches && i < end; ++i)
        if (distance(touches[i], now) != Distance::kOrdered)
          return {Conflict::kRace, i << page.shift, touches[i], static_cast<uint8_t>(kind)};
    }
  }
  return {};
}

// The last access becomes the far one if it is at least as far from the new access.
bool keep_far(ShadowPage& page, uint32_t begin, uint32_t end, const Access& now) {
  const Touch* last = page.last[now.kind];
  for (uint32_t i = begin; i < end; ++i) {
    Distance of_last = distance(last[i], now);
    if (of_last == Distance::kOrdered) continue;
    Touch* far = entries(page, &page.far[now.kind]);
    if (!far) return false;
    if (of_last >= distance(far[i], now)) far[i] = last[i];
  }
  return true;
}

inline bool record(ShadowPage& page, uint32_t begin, uint32_t end, const Access& now) {
  Touch* last = entries(page, &page.last[now.kind]);
  if (!last) return false;
  if (now.kind != kWrite && !all_settled(last, begin, end, now.clock.settled()) &&
      !keep_far(page, begin, end, now))
    return false;
  std::fill(last + begin, last + end, now.touch);
  return true;
}

inline ConflictReport access_page(ShadowPage& page, uint32_t at, uint32_t bytes, const Access& now,
                                  bool checked) {
  Lock lock(now.clock.shared() ? &page.held : nullptr);
  uint32_t unit = at | bytes;
  if (unit & ((1u << page.shift) - 1) && !split(page, __builtin_ctz(unit)))
    return {Conflict::kNoMemory, 0, now.touch, now.kind};
  uint32_t begin = at >> page.shift, end = (at + bytes) >> page.shift;
  ConflictReport report{};
  if (checked) report = check(page, begin, end, now);
  if (report.kind != Conflict::kNone)
    report.byte -= at;
  else if (!record(page, begin, end, now))
    report.kind = Conflict::kNoMemory;
  return report;
}

}  // namespace

ShadowPage::~ShadowPage() {
  for (Touch* touches : last) free(touches);
  for (Touch* touches : far) free(touches);
}

Shadow::~Shadow() {
  if (pages_) forget();
  free(pages_);
}

bool Shadow::init(uint64_t bytes) {
  count_ = (bytes + kShadowPageBytes - 1) / kShadowPageBytes;
  pages_ =
      static_cast<std::atomic<ShadowPage*>*>(calloc(std::max<uint64_t>(count_, 1), sizeof *pages_));
  return pages_ != nullptr;
}

void Shadow::forget() {
  for (uint64_t i = 0; i < count_; ++i) {
    ShadowPage* page = pages_[i].load(std::memory_order_relaxed);
    if (page) pages_[i].store(nullptr, std::memory_order_relaxed);
    delete page;
  }
}

inline ShadowPage* Shadow::page(uint64_t index) {
  ShadowPage* page = pages_[index].load(std::memory_order_acquire);
  if (page) return page;
  auto* fresh = new (std::nothrow) ShadowPage;
  if (!fresh || pages_[index].compare_exchange_strong(page, fresh, std::memory_order_acq_rel))
    return fresh;
  delete fresh;  // another host thread was faster
  return page;
}

ConflictReport Shadow::access(uint64_t offset, uint32_t bytes, const Access& now, bool checked) {
  for (uint32_t done = 0; done < bytes;) {
    uint32_t at = static_cast<uint32_t>((offset + done) % kShadowPageBytes);
    uint32_t here = std::min(bytes - done, kShadowPageBytes - at);
    ShadowPage* page = this->page((offset + done) / kShadowPageBytes);
    if (!page) return {Conflict::kNoMemory, 0, now.touch, now.kind};
    ConflictReport report = access_page(*page, at, here, now, checked);
    if (report.kind != Conflict::kNone) {
      report.byte += done;
      return report;
    }
    done += here;
  }
  return {};
}

}  // namespace metal_attn::simulator
