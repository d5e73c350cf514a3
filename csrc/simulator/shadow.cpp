#include "shadow.h"

#include <cstdlib>

#include "../../torch_metal_attn/simulator/shim/abi.h"

namespace metal_attn::simulator {
namespace {

uint32_t simdgroup(uint32_t thread) { return thread / MSL_SIMD_WIDTH; }

// An earlier access of this threadgroup's epoch, by another thread, with no barrier of a common
// SIMD group between.
bool unordered(const ShadowAccess& now, uint32_t thread, uint32_t epoch, uint32_t simd_epoch) {
  if (epoch != now.epoch || thread == now.thread) return false;
  return simdgroup(thread) != simdgroup(now.thread) || simd_epoch == now.simd_epoch;
}

ConflictReport check(const ShadowCell& cell, const ShadowAccess& now) {
  bool written = cell.write_epoch >= now.first_epoch;
  if (!now.write && !written) return {Conflict::kUninitialised, 0, now.thread, ~0u};
  bool both_atomic = now.atomic && cell.write_atomic;
  if (written && !both_atomic &&
      unordered(now, cell.writer, cell.write_epoch, cell.write_simd_epoch))
    return {now.write ? Conflict::kWriteWrite : Conflict::kWriteRead, 0, cell.writer,
            cell.write_site};
  if (!now.write || cell.read_epoch != now.epoch || (now.atomic && cell.read_atomic)) return {};
  if (unordered(now, cell.reader, cell.read_epoch, cell.read_simd_epoch))
    return {Conflict::kReadWrite, 0, cell.reader, cell.read_site};
  if (cell.several_readers && simdgroup(cell.reader) == simdgroup(now.thread) &&
      cell.read_simd_epoch == now.simd_epoch)
    return {Conflict::kReadWrite, 0, cell.reader, cell.read_site};
  if (cell.has_far_reader && simdgroup(cell.far_reader) != simdgroup(now.thread))
    return {Conflict::kReadWrite, 0, cell.far_reader, cell.far_read_site};
  return {};
}

void record(ShadowCell& cell, const ShadowAccess& now) {
  if (now.write) {
    cell.write_epoch = now.epoch;
    cell.write_simd_epoch = now.simd_epoch;
    cell.write_site = now.site;
    cell.writer = now.thread;
    cell.write_atomic = now.atomic;
    return;
  }
  if (cell.read_epoch != now.epoch) {
    cell.has_far_reader = false;
    cell.several_readers = false;
    cell.read_atomic = now.atomic;
  } else {
    cell.read_atomic &= now.atomic;
    if (simdgroup(cell.reader) != simdgroup(now.thread)) {
      cell.has_far_reader = true;
      cell.far_reader = cell.reader;
      cell.far_read_site = cell.read_site;
      cell.several_readers = false;
    } else if (cell.read_simd_epoch != now.simd_epoch) {
      cell.several_readers = false;
    } else if (cell.reader != now.thread) {
      cell.several_readers = true;
    }
  }
  cell.read_epoch = now.epoch;
  cell.read_simd_epoch = now.simd_epoch;
  cell.read_site = now.site;
  cell.reader = now.thread;
}

}  // namespace

Shadow::~Shadow() { free(cells_); }

bool Shadow::init(uint32_t bytes) {
  cells_ = static_cast<ShadowCell*>(calloc(bytes, sizeof(ShadowCell)));
  return cells_ != nullptr;
}

ConflictReport Shadow::access(uint32_t offset, uint32_t bytes, const ShadowAccess& now) {
  for (uint32_t i = 0; i < bytes; ++i) {
    ShadowCell& cell = cells_[offset + i];
    ConflictReport conflict = check(cell, now);
    if (conflict.kind != Conflict::kNone) {
      conflict.byte = i;
      return conflict;
    }
    record(cell, now);
  }
  return {};
}

}  // namespace metal_attn::simulator
