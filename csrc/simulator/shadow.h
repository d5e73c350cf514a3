// What is known about each byte of threadgroup memory: who wrote and who read it last.
#pragma once

#include <cstdint>

namespace metal_attn::simulator {

struct ShadowCell {
  // An epoch counts the threadgroup's barriers, a SIMD epoch those of the SIMD group that made the
  // access.
  uint32_t write_epoch, write_simd_epoch, write_site;
  uint32_t read_epoch, read_simd_epoch, read_site;
  uint32_t far_read_site;
  uint16_t writer;
  uint16_t reader;      // the last one
  uint16_t far_reader;  // of another SIMD group than the last reader's, in the same epoch
  uint8_t write_atomic : 1;
  uint8_t read_atomic : 1;      // every read of the epoch was atomic
  uint8_t several_readers : 1;  // of the last reader's SIMD group, in its SIMD epoch
  uint8_t has_far_reader : 1;
};

struct ShadowAccess {
  uint32_t epoch, first_epoch, simd_epoch, site;
  uint16_t thread;
  bool write, atomic;
};

enum class Conflict : uint8_t { kNone, kUninitialised, kWriteWrite, kReadWrite, kWriteRead };

struct ConflictReport {
  Conflict kind;
  uint32_t byte;  // of the access
  uint32_t other_thread;
  uint32_t other_site;
};

class Shadow {
 public:
  Shadow() = default;
  Shadow(const Shadow&) = delete;
  Shadow& operator=(const Shadow&) = delete;
  ~Shadow();
  bool init(uint32_t bytes);
  // Records an access to the bytes from `offset`, or says what it conflicts with.
  ConflictReport access(uint32_t offset, uint32_t bytes, const ShadowAccess& access);

 private:
  ShadowCell* cells_ = nullptr;
};

}  // namespace metal_attn::simulator
